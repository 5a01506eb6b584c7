"""The GPU: depthwise convolutions of channels-last images, and their gradients, are right for all windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, hopper, poisoned
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_cuda_depthwise_on_host import FORMATS, TOLERANCE, depthwise, kernel_of

from adtrain.lowering.cuda.conv.problem import Direction
from adtrain.ops.conv import Window

__all__ = ["gpu", "hopper", "poisoned"]

pytestmark = pytest.mark.gpu


def pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


@pytest.mark.parametrize("operand_format", FORMATS)
@pytest.mark.parametrize("direction", Direction, ids=lambda x: x.name.lower())
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    count=st.integers(1, 40),
    size=pairs(1, 40),
    chunks=st.integers(1, 40),
    kernel=pairs(1, 7),
    window=st.tuples(pairs(1, 3), pairs(0, 3), pairs(1, 3)),
)
def test_depthwise_convolutions_and_gradients_are_right(
    gpu: Any,
    direction: Direction,
    operand_format: str,
    count: int,
    size: tuple[int, int],
    chunks: int,
    kernel: tuple[int, int],
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
) -> None:
    moves = Window(*window, 1)
    assume(min(moves.output_length(i, size[i], kernel[i]) for i in (0, 1)) > 0)
    primitive, arrays, params = depthwise(direction, (count, *size, 8 * chunks), kernel, moves, operand_format)
    found = run_twice(gpu, primitive, kernel_of(primitive, arrays, params, gpu.lowering.target), arrays, **params)[0]
    expected = primitive.reference(*arrays, **params)
    assert np.linalg.norm(found - expected) <= 2 * TOLERANCE * np.linalg.norm(expected)
