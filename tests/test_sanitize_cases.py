"""What the compute-sanitizer is run on; no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pytest
from cuda_samples import LARGE, programs
from sanitize_cases import Run, runs
from test_cuda_sources import kernel_functions

from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.program import Equation

pytestmark = pytest.mark.exhaustive

MAX_FLOPS = 2 * 10**9
"""Of one equation: instrumented kernels are up to hundreds of times slower."""


Work: TypeAlias = "tuple[Run, Equation, Sequence[LaunchPlan]]"
"""A run, an equation of it, and the launches of a candidate that it runs for the equation."""


@pytest.fixture(scope="module")
def works() -> list[Work]:
    return [
        (run, equation, launches)
        for run in runs(Lowering(H200))
        for equation, fresh in run.fresh.items()
        for _, launches in fresh
    ]


def test_the_sanitizer_runs_every_kernel_function_on_an_h200(works: list[Work]) -> None:
    assert kernel_functions() <= {(launch.source.name, launch.name) for *_, launches in works for launch in launches}


def test_the_sanitizer_runs_no_candidate_twice_and_no_large_program(works: list[Work]) -> None:
    for run in {id(run): run for run, *_ in works}.values():
        for equation in run.fresh:
            cost = equation.primitive.cost([v.type for v in equation.inputs], equation.params)
            assert cost.flops <= MAX_FLOPS, run.name
    seen = {tuple((x.source, x.name, x.numbers, x.size) for x in launches) for *_, launches in works}
    assert len(seen) == len(works) > 1000
    assert len(programs()) - len(programs(large=False)) == len(LARGE)
