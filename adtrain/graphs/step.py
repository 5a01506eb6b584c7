"""The graph of a Program after each of its passes: of a training step, or of a function (`adtrain.graph`)."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from adtrain import training
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.config import Config
from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Pass
from adtrain.graphs.details import Kernel, Statistics, kernels, value_statistics
from adtrain.graphs.ladder import Ladder
from adtrain.graphs.layout import ladder_picture
from adtrain.graphs.picture import Graph, Picture
from adtrain.graphs.roles import NO_FOLDS, Place, Roles, flat, folds, program_text
from adtrain.jitted import Jitted, jit
from adtrain.passes import SIMPLIFY
from adtrain.passes.fusion import declined
from adtrain.text import counted
from adtrain.training import Experiment

TRACE = "trace"
"""The name of the Program before the first pass."""
SIMPLIFIED = SIMPLIFY[-1].__name__
"""The last pass before those that fuse equations."""


def step_graph(
    cfg: Config,
    after: str = SIMPLIFIED,
    detail: bool = False,
    target: Target | None = None,
    values: Callable[[Experiment], Sequence[np.ndarray]] | None = None,
) -> Graph:
    """The graph of a config's training step. Without `values` no data are read, and nothing is run.

    Args:
        values: the inputs of the step, whose values the graph has; see `details.first_batch_inputs`.
        target: the GPU that runs the step; None for the CPU. This machine needs no GPU.
        after: the pass after which the Program is shown; of one that runs twice, the first time.
        detail: draw a box for each equation instead of one for each layer and phase.

    Raises:
        AdtrainError: there is no such pass. The message lists the names.
        ConfigError: the layers do not fit together.
    """
    experiment = training.outline(cfg) if values is None else training.prepare(cfg)
    program = experiment.step_program(passes=())
    title = f"{cfg.name}: a training step on {counted(experiment.full_batch, cfg.data.examples)}"
    labels = {"optimizer": cfg.optimizer.kind, "loss": f"{cfg.loss.kind} loss"}
    arguments = None if values is None else partial(values, experiment)
    return program_graph(program, experiment.step_inputs, title, labels, after, detail, target, arguments)


def program_graph(
    program: Program,
    inputs: Sequence[str],
    title: str,
    labels: Mapping[str, str],
    after: str,
    detail: bool,
    target: Target | None = None,
    arguments: Callable[[], Sequence[np.ndarray]] | None = None,
) -> Graph:
    """The graph of a traced Program.

    Args:
        inputs: the names of its inputs.
        arguments: the inputs, for statistics of the values; None for a graph without them.
        labels: names of scopes that are not layers.
        after, detail, target: see `step_graph`.
    """
    passes = (*SIMPLIFY, *(cpu_fusions() if target is None else gpu_fusions(target)))
    names = list(dict.fromkeys([TRACE, *map(_pass_name, passes)]))
    if after not in names:
        raise AdtrainError(f"unknown pass {after!r}; {known(after, names, 'passes')}")
    folded = NO_FOLDS if detail else folds(program)
    labels = {**labels, **folded.labels}
    order = Roles(program, inputs, folded.scopes).rows
    programs = list(_after_passes(program, passes))
    ladders = [(name, Ladder(Roles(x, inputs, folded.scopes), labels, order, detail)) for name, x in programs]
    chosen = next(ladder for name, ladder in ladders if name == after)
    values = {} if arguments is None else _values(chosen, arguments())
    last = ladders[-1][1]
    numbered, numbers = _numbered(last)
    counts = [(name, Counter(map(ladder.roles.place, ladder.roles.program.equations))) for name, ladder in ladders]
    pictures: list[Picture] = []
    shown = 0
    for name, ladder in ladders:
        ladder.values, ladder.equation_counts, ladder.kernels = values, counts, numbers
        picture = ladder_picture(ladder, title, name)
        if not pictures or replace(picture, name="") != replace(pictures[-1], name=""):
            pictures.append(picture)
        if ladder is chosen:
            shown = len(pictures) - 1

    def make_kernels() -> list[Kernel]:
        found = kernels(last.roles.program, target)
        return [Kernel("\n".join(x.title for x in found.get(e, ())), "\n".join(x.text for x in found.get(e, ())))
                for e in numbered]  # fmt: skip

    notes = declined(passes, [x for _, x in programs])
    return Graph(pictures, shown, program_text(chosen.roles), make_kernels, notes)


def _values(ladder: Ladder, arguments: Sequence[np.ndarray]) -> dict[Variable, Statistics]:
    """The statistics of the values of a ladder's flows."""
    return value_statistics(ladder.roles.program, arguments, {v for flow in ladder.flows for v in flow.values})


def _numbered(ladder: Ladder) -> tuple[list[Equation], dict[Place, list[int]]]:
    """The equations that have kernels, and the numbers of those of each place."""
    roles = ladder.roles
    numbered = [e for e in roles.program.equations if not e.is_view]
    found: dict[Place, list[int]] = {}
    for number, e in enumerate(numbered):
        for place in {roles.places[member] for member in flat([e])}:
            found.setdefault(place, []).append(number)
    return numbered, found


def _after_passes(program: Program, passes: Sequence[Pass]) -> Iterator[tuple[str, Program]]:
    """The traced Program, and the Program after each pass, with the name of the pass."""
    yield TRACE, program
    for apply in passes:
        program = apply(program)
        yield _pass_name(apply), program


def _pass_name(apply: Pass) -> str:
    name: str = getattr(apply, "func", apply).__name__
    return name


def graph(f: Callable[..., Any], *args: Any, after: str = SIMPLIFIED, detail: bool = False, **options: Any) -> Graph:
    """The graph of a function for arguments of these types. The function is traced as by `jit`; nothing is run.

    Forward equations run down the left, gradients up the right, and equations that depend on gradients follow at the
    far right. What is stored for the gradients is drawn between them, with its bytes. Equations in layers are drawn as
    one box for each layer, others one by one.

    Args:
        f: function of trees of arrays to a tree of arrays, or the result of `jit`.
        args, options: its arguments.
        after: the pass of the compiler after which equations are shown, or "trace"; by default the last one before
            fusion.
        detail: draw a box for each equation in layers as well.

    Returns:
        The graph: `svg`, `html` and `dot` as text, `save(path)` for files. A notebook shows it.

    Raises:
        OptionError: `f` is not a function. AdtrainError: there is no pass of that name.
        TraceError, DTypeError: see `jit`.
    """
    jitted = f if isinstance(f, Jitted) else jit(f)
    program, places = jitted.trace(*args, **options)
    try:
        parameters = list(inspect.signature(jitted).parameters)
    except (TypeError, ValueError):  # a function written in C
        parameters = []
    names: dict[int | str, str] = dict(enumerate(parameters[: len(args)]))
    inputs = [".".join(filter(None, (str(names.get(place, place)), path))) for place, path in places]
    name = getattr(jitted, "__name__", "function")
    title = f"{name}({', '.join(dict.fromkeys(path.partition('.')[0] for path in inputs))})"
    return program_graph(program, inputs, title, {}, after, detail)
