"""The graph of a Program after each of its passes: of a training step, or of a function (`adtrain.graph`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adtrain import training
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.config import Config
from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Program
from adtrain.core.staging import Pass
from adtrain.core.target import Target
from adtrain.graphs.formats import Graph
from adtrain.graphs.ladder import Ladder
from adtrain.graphs.layout import ladder_picture
from adtrain.graphs.picture import Picture
from adtrain.graphs.roles import Roles, program_text
from adtrain.jitted import Jitted, jit
from adtrain.passes import SIMPLIFY
from adtrain.text import counted

TRACE = "trace"
"""The name of the Program before the first pass."""
SIMPLIFIED = SIMPLIFY[-1].__name__
"""The last pass before those that fuse equations."""


def step_graph(cfg: Config, after: str = SIMPLIFIED, detail: bool = False, target: Target | None = None) -> Graph:
    """The graph of a config's training step. No data are read, and nothing is run.

    Args:
        target: the GPU that runs the step; None for the CPU. This machine needs no GPU.
        after: the pass after which the Program is shown; of one that runs twice, the first time.
        detail: draw a box for each equation instead of one for each layer and phase.

    Raises:
        AdtrainError: there is no such pass. The message lists the names.
        ConfigError: the layers do not fit together.
    """
    experiment = training.outline(cfg)
    program = experiment.step_program(passes=())
    title = f"{cfg.name}: a training step on {counted(experiment.full_batch, cfg.data.examples)}"
    labels = {"optimizer": cfg.optimizer.kind, "loss": f"{cfg.loss.kind} loss"}
    return program_graph(program, experiment.step_inputs, title, labels, after, detail, target)


def program_graph(
    program: Program,
    inputs: Sequence[str],
    title: str,
    labels: Mapping[str, str],
    after: str,
    detail: bool,
    target: Target | None = None,
) -> Graph:
    """The graph of a traced Program.

    Args:
        inputs: the names of its inputs.
        labels: names of scopes that are not layers.
        after, detail, target: see `step_graph`.
    """
    passes = (*SIMPLIFY, *(cpu_fusions() if target is None else gpu_fusions(target)))
    names = list(dict.fromkeys([TRACE, *map(_pass_name, passes)]))
    if after not in names:
        raise AdtrainError(f"unknown pass {after!r}; {known(after, names, 'passes')}")
    pictures: list[Picture] = []
    shown, text = None, ""
    order = Roles(program, inputs).rows
    for name, result in _after_passes(program, passes):
        roles = Roles(result, inputs)
        picture = ladder_picture(Ladder(roles, labels, order, detail), title, name)
        if not pictures or replace(picture, name="") != replace(pictures[-1], name=""):
            pictures.append(picture)
        if name == after and shown is None:
            shown, text = len(pictures) - 1, program_text(roles)
    return Graph(pictures, shown or 0, text)


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
