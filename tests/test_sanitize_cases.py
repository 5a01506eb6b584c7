"""What the compute-sanitizer is run on; no GPU is needed."""

from __future__ import annotations

from cuda_samples import LARGE, all_candidates, programs
from sanitize_cases import runs
from test_cuda_sources import kernel_functions

from adtrain.backends.cuda.lower import Lowering
from adtrain.core.target import H200

MAX_FLOPS = 2 * 10**9
"""Of one equation: instrumented kernels are up to hundreds of times slower."""


def test_the_sanitizer_runs_every_kernel_function_on_an_h200() -> None:
    lowering, functions = Lowering(H200), set()
    for run in runs(lowering):
        for equation, fresh in run.fresh.items():
            for kernel, launches in all_candidates(lowering, equation):
                if kernel in fresh:
                    functions |= {(launch.source.name, launch.name) for launch in launches}
    assert kernel_functions() <= functions


def test_the_sanitizer_runs_no_candidate_twice_and_no_large_program() -> None:
    lowering, seen = Lowering(H200), set()
    for run in runs(lowering):
        for equation, fresh in run.fresh.items():
            cost = equation.primitive.cost([v.type for v in equation.inputs], equation.params)
            assert cost.flops <= MAX_FLOPS, run.name
            for kernel, launches in all_candidates(lowering, equation):
                if kernel in fresh:
                    key = tuple((x.source, x.name, x.numbers, x.size) for x in launches)
                    assert key not in seen
                    seen.add(key)
    assert len(seen) > 1000
    assert len(programs()) - len(programs(large=False)) == len(LARGE)
