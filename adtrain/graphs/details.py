"""What a page shows of a Program after a click: its values for one batch as statistics, and the text of its kernels."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adtrain.backends.cpu.codegen import generate, supported, workspace
from adtrain.backends.cpu.numpy_program import as_declared
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core import tree
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.plan_memory import plan_memory
from adtrain.training import Experiment, model_file
from adtrain.training.loop import batches_of

BINS, FIRST = 24, 8
"""Columns of a histogram, and the elements that are shown."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of an array.

    Attributes:
        type: the dtype and the shape, such as "float32[3, 32]".
        low, high, mean, deviation: of the finite elements; None if there are none.
        zeros: the share of elements that are 0.
        nan, infinite: how many elements are NaN, and infinite.
        first: the first elements in C order.
        histogram: how many finite elements are in each of BINS parts of the range from `low` to `high`.
    """

    type: str
    low: float | None
    high: float | None
    mean: float | None
    deviation: float | None
    zeros: float
    nan: int
    infinite: int
    first: tuple[str, ...]
    histogram: tuple[int, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Names and values."""
        numbers = {"min": self.low, "max": self.high, "mean": self.mean, "std": self.deviation}
        found = [(name, f"{x:.6g}") for name, x in numbers.items() if x is not None]
        counts = [(name, f"{x:,}") for name, x in (("NaN", self.nan), ("infinite", self.infinite)) if x]
        return [*found, ("zeros", f"{self.zeros:.1%}"), *counts, ("first", ", ".join(self.first))]

    @property
    def bars(self) -> list[float]:
        """The heights of the histogram's columns, 0 to 1. Those above 0 are at least 0.06, so that they are seen."""
        most = max(self.histogram, default=0) or 1
        return [max(0.06, x / most) if x else 0.0 for x in self.histogram]


def statistics(x: np.ndarray) -> Statistics:
    """The statistics of an array, which is not empty."""
    numbers = x.astype(np.float64).ravel()
    finite = numbers[np.isfinite(numbers)]
    found: dict[str, float | None] = dict.fromkeys(("low", "high", "mean", "deviation"))
    histogram: tuple[int, ...] = ()
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        # Computed on numbers within [-1, 1], so that no sum overflows.
        scale = max(abs(low), abs(high)) or 1.0
        scaled = finite / scale
        found = {
            "low": low, "high": high, "mean": float(scaled.mean()) * scale, "deviation": float(scaled.std()) * scale
        }  # fmt: skip
        width = (high / scale - low / scale) or 1.0
        bins = np.minimum(((scaled - low / scale) / width * BINS).astype(np.int64), BINS - 1)
        histogram = tuple(np.bincount(bins, minlength=BINS).tolist())
    return Statistics(
        **found,
        type=f"{x.dtype}[{', '.join(map(str, x.shape))}]",
        zeros=float(np.mean(numbers == 0)),
        nan=int(np.isnan(numbers).sum()),
        infinite=int(np.isinf(numbers).sum()),
        first=tuple(f"{value:.4g}" for value in numbers[:FIRST].tolist()),
        histogram=histogram,
    )


def value_statistics(
    program: Program, arguments: Sequence[np.ndarray], wanted: Collection[Variable]
) -> dict[Variable, Statistics]:
    """The statistics of the wanted values, which the NumPy references of the equations compute."""
    known = {v: np.asarray(x.buffer) for v, x in program.constants.items()}
    known |= dict(zip(program.inputs, arguments, strict=True))
    found = {v: statistics(x) for v, x in known.items() if v in wanted and x.size}
    with np.errstate(all="ignore"):
        for e, dead in zip(program.equations, program.last_uses(), strict=True):
            results = e.primitive.reference(*(known[v] for v in e.inputs), **e.params)
            for v, x in zip(e.outputs, (results,) if len(e.outputs) == 1 else results, strict=True):
                known[v] = as_declared(e.name, x, v.type)
                if v in wanted and known[v].size:
                    found[v] = statistics(known[v])
            for v in dead:
                known.pop(v, None)
    return found


def first_batch_inputs(experiment: Experiment, run: Path | None = None) -> list[np.ndarray]:
    """The inputs of a step on the first batch of the first epoch, as `Experiment.step_inputs` names them.

    The weights are the initial ones, or those of the run in a folder.

    Raises AdtrainError where the run has no weights.
    """
    state = experiment.initial_state("cpu")
    if run is not None:
        trained = model_file.load(run)
        state = state._replace(params=trained.params, statistics=trained.statistics)
    batch = experiment.part(next(iter(batches_of(experiment, 1)))[: experiment.full_batch])
    arguments = experiment.step_arguments(experiment.divided(tree.map(np.asarray, state)), batch)
    return [np.asarray(x) for x in tree.leaves(arguments)]


FUNCTION = re.compile(r"^static (?:__attribute__\(\(noinline\)\) )?void (\w+)\([^\n]*\{\n.*?^\}\n", re.M | re.S)
"""A function of generated C, and its name."""


@dataclass(frozen=True)
class Kernel:
    """The kernel of an equation, or one of its launches on a GPU."""

    title: str
    text: str


def kernels(program: Program, target: Target | None) -> dict[Equation, list[Kernel]]:
    """The kernels by equation, on the CPU without a target. An equation without one, such as a view, is left out."""
    if target is not None:
        lowering = Lowering(target)
        return {e: list(_launches(lowering, e)) for e in program.equations if not e.is_view}
    if not all(map(supported, program.equations)):
        return {}
    generated = generate(program, plan_memory(program, workspace, 0, None))
    functions = {found[1]: found[0] for found in FUNCTION.finditer(generated.text)}
    found: dict[Equation, list[Kernel]] = {}
    for number, (e, called) in enumerate(zip(program.equations, generated.kernels, strict=True)):
        name = next((name for name in functions if name.startswith(f"equation_{number}_")), None)
        if name is not None:
            others = [x for x in called if x != "loops"]
            title = f"{e.name}: C" + (f", with {', '.join(others)} of kernels/cpu" if others else "")
            found[e] = [Kernel(title, "\n".join(_with_helpers(name, functions)))]
    return found


def _with_helpers(name: str, functions: dict[str, str]) -> list[str]:
    """The functions that a function names, and the function itself."""
    text = functions[name]
    helpers = [
        x for x in dict.fromkeys(re.findall(r"\w+", text)) if x in functions and x not in (name, "fail", "fetch")
    ]
    return [*(functions[x] for x in helpers), text]


def _launches(lowering: Lowering, e: Equation) -> Iterator[Kernel]:
    for launch in lowering.launches(e):
        if not isinstance(launch, LaunchPlan):
            yield Kernel(f"{e.name}: {launch.label}", "")
            continue
        source = launch.source
        macros = [f"// {option}\n" for option in source.options if option.startswith("-D")]
        yield Kernel(f"{e.name}: {launch.name} of {source.name}", "".join(macros) + source.text)
