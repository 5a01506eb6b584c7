"""Every case of the case table on a GPU: eager, as an unfused Program, and as a fused one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gpu_parity import TOLERANCE, check, gpu, poisoned
from test_cpu_programs import values_and_gradients

from adtrain.cases import CASES, Case
from adtrain.core.array import Array
from adtrain.core.staging import stage
from adtrain.passes import ALL

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

FIRST = {case.op: case for case in reversed(CASES)}


def each_of(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """The cases in float32, and the first one of each operation in float64; the others are exhaustive."""
    found = [
        pytest.param(
            case,
            dtype,
            marks=() if dtype == "float32" or case is FIRST[case.op] else pytest.mark.exhaustive,
            id=f"{dtype}-{case.op}, {case.name}",
        )
        for case in cases
        for dtype in TOLERANCE
    ]
    return pytest.mark.parametrize(("case", "dtype"), found)


EACH = each_of(CASES)
WITH_KERNELS = each_of([case for case in CASES if case.op != "gather_shards"])
"""Without passes, exchanges between shards have no kernel."""


def results(case: Case, dtype: str, device: str) -> list[np.ndarray]:
    return [x.numpy() for x in values_and_gradients(case, [x.to(device) for x in case.sample(dtype)])]


def staged(case: Case, dtype: str, passes: Sequence[Callable[..., Any]]) -> list[np.ndarray]:
    given: list[Array] = [x.to("gpu") for x in case.sample(dtype)]
    found = stage(lambda *xs: tuple(values_and_gradients(case, xs)), passes)(*given)
    return [x.numpy() for x in found]


@EACH
def test_eager_results_match_the_cpu_and_repeat_bit_for_bit(case: Case, dtype: str) -> None:
    found = results(case, dtype, "gpu")
    check(found, results(case, dtype, "cpu"), TOLERANCE[dtype])
    for x, y in zip(found, results(case, dtype, "gpu"), strict=True):
        assert x.tobytes() == y.tobytes()


@WITH_KERNELS
def test_an_unfused_program_has_the_bits_of_eager_execution(case: Case, dtype: str) -> None:
    for x, y in zip(staged(case, dtype, ()), results(case, dtype, "gpu"), strict=True):
        np.testing.assert_array_equal(x, y)


@EACH
def test_a_fused_program_matches_eager_execution_and_repeats_bit_for_bit(case: Case, dtype: str) -> None:
    """Up to the order of sums."""
    found = staged(case, dtype, ALL)
    check(found, results(case, dtype, "gpu"), TOLERANCE[dtype])
    for x, y in zip(found, staged(case, dtype, ALL), strict=True):
        assert x.tobytes() == y.tobytes()
