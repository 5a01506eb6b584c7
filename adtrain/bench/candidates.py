"""Times every kernel candidate that a GPU has for the operations of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from adtrain.backends.cuda.lower import fastest
from adtrain.backends.cuda.tuner.autotune import Mode, Tuner, tuning_problems
from adtrain.backends.cuda.tuner.measure import described
from adtrain.bench.op_table import Bench
from adtrain.bench.ops import phases, sample
from adtrain.bench.timing.protocol import observed_load, protocol
from adtrain.bench.timing.sampling import rate
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Equation
from adtrain.core.staging import stage


def result(benches: Sequence[Bench], sizes: Sequence[int] | None, progress: Callable[[str], object]) -> dict[str, Any]:
    """The result of `adtrain bench ops --candidates`, as JSON values; see `measured`."""
    conditions = protocol("gpu", observed_load(progress))
    return {"kind": "candidates", "protocol": conditions, "candidates": measured(benches, sizes, progress)}


def measured(
    benches: Sequence[Bench], sizes: Sequence[int] | None = None, progress: Callable[[str], object] = str
) -> list[dict[str, Any]]:
    """For each distinct problem of the benches its candidates, the fastest first.

    Args:
        sizes: of the arrays, by default each bench's own.
        progress: called with a line for the user.

    Raises:
        AdtrainError: every problem has a single kernel.
    """
    equations: list[Equation] = []
    for each in benches:
        for n in sizes or each.sizes["gpu"]:
            for f, args in phases(each, sample(each, n, device="gpu")).values():
                equations += stage(f).program(*args).equations
    return of_equations(equations, progress)


def of_equations(equations: Sequence[Equation], progress: Callable[[str], object] = str) -> list[dict[str, Any]]:
    """As `measured`, for equations. "chosen" marks the tuner's choice, "rule" the choice without measurements."""
    tuner: Tuner = cast(Any, backend("gpu")).tuner
    problems = list(tuning_problems(tuner.lowering, equations))
    if not problems:
        raise AdtrainError("--candidates: each of these operations has only one kernel")
    progress(f"bench: measuring the candidates of {len(problems)} problems")
    rows = []
    for problem, times in tuner.times(problems, measured=True):
        equation, rule = problem.equation, problem.labels[0]
        cost = equation.cost
        chosen = rule if tuner.mode is Mode.OFF else fastest(problem.labels, times)
        found = [
            {
                "kernel": name,
                "us": us,
                "gflops_per_s": rate(cost.flops, us * 1e-3),
                "gbytes_per_s": rate(cost.bytes, us * 1e-3),
                "rule": name == rule,
                "chosen": name == chosen,
            }
            for name, us in sorted(times.items(), key=lambda item: item[1])
        ]
        params = {name: str(value) for name, value in equation.params.items()}
        rows.append({"problem": described(equation), "params": params, "candidates": found})
    return rows
