"""The GPU: convolutions of bfloat16 images, and their gradients, are right for all windows and channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, poisoned
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_cuda_bfloat16_conv_on_host import KINDS, TOLERANCES, primitive_of, problem, tiles
from test_gpu_bfloat16 import hopper

from adtrain.lowering.cuda.conv.bfloat16 import Direction
from adtrain.lowering.cuda.gemm.bfloat16 import TILE_K, TILES
from adtrain.ops.conv import Window

__all__ = ["gpu", "hopper", "poisoned"]

pytestmark = pytest.mark.gpu


def pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


eights = st.integers(1, 40).map(lambda n: 8 * n)


@pytest.mark.parametrize(("direction", "name"), KINDS)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    count=st.integers(1, 40),
    size=pairs(1, 20),
    channels=st.tuples(eights, eights),
    kernel=pairs(1, 5),
    window=st.tuples(pairs(1, 3), pairs(0, 3), pairs(1, 3)),
    index=st.integers(0, len(TILES) - 1),
    splits=st.sampled_from([1, 1, 2, 5]),
)
def test_convolutions_and_gradients_are_right(
    gpu: Any,
    direction: Direction,
    name: str,
    count: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    index: int,
    splits: int,
) -> None:
    moves = Window(*window, 1)
    assume(min(moves.output_length(i, size[i], kernel[i]) for i in (0, 1)) > 0)
    conv, arrays, params = problem(direction, (count, *size, channels[0]), channels[1], kernel, moves, name)
    assume(conv.fits())
    splits = min(splits, -(-conv.lengths[3] // TILE_K))
    tile = tiles(name)[index % len(tiles(name))]
    work = conv.product(gpu.lowering.target, tile, splits)
    primitive = primitive_of(conv, params)
    found = run_twice(gpu, primitive, conv.cuda_kernel(work), arrays, **params)[0]
    expected = primitive.reference(*arrays, **params)
    assert np.linalg.norm(found - expected) <= 2 * TOLERANCES[conv.terms] * np.linalg.norm(expected)
