"""The GPU: products that split operands on the fly are right for all shapes, and as exact as sequential float32 FMA."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from conv_samples import cases
from gpu_parity import gpu, hopper, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from product_samples import NOISE, OF_TENSOR_CORES, TWO_ROUNDINGS, errors
from test_gpu_products import computed, distance, exact, operands

from adtrain.lowering.cuda.gemm import BlockGemm
from adtrain.lowering.cuda.gemm.bf16x3 import Bf16x3Gemm, Bf16x3Tile
from adtrain.lowering.cuda.gemm.cost_model import BF16X3_WIDTHS
from adtrain.lowering.cuda.gemm.tiles import FMA_TILES
from adtrain.ops.matmul import matmul_p

__all__ = ["gpu", "hopper", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = 5e-7
"""The norm of the difference relative to that of sums without cancellation."""
M, N = 256, 192

Lengths: TypeAlias = "tuple[int, int, int, int]"
"""Batch, M, N and K."""


def multiplied(
    gpu: Any, shape: Lengths, a: np.ndarray, b: np.ndarray, width: int, splits: int, ta: bool = False, tb: bool = False
) -> Any:
    kernel = Bf16x3Gemm(gpu.lowering.target, shape, Bf16x3Tile(width), splits, (ta, tb)).kernel()
    return computed(gpu, matmul_p, kernel, [a, b], transpose_a=ta, transpose_b=tb)


@pytest.mark.slow
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("width", BF16X3_WIDTHS)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 400), st.integers(1, 600), st.integers(1, 1500)),
    splits=st.integers(1, 6),
)
def test_products_of_all_shapes_are_right(
    gpu: Any, shape: Lengths, width: int, splits: int, ta: bool, tb: bool
) -> None:
    a, b = operands(shape, ta, tb, "float32")
    found = multiplied(gpu, shape, a, b, width, min(splits, -(-shape[-1] // 32)), ta, tb)
    x, y = a.astype(float), b.astype(float)
    size = np.linalg.norm(np.sqrt(exact(x * x, y * y, ta, tb)))
    assert np.linalg.norm(found - exact(a, b, ta, tb)) < TOLERANCE * size


def test_a_block_computes_several_tiles(gpu: Any) -> None:
    shape = (3, 1030, 1500, 140)
    a, b = operands(shape, False, False, "float32")
    assert distance(multiplied(gpu, shape, a, b, 128, 2), exact(a, b, False, False)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("k", "splits"), [(128, 1), (256, 2), (576, 1), (1024, 4)])
def test_they_are_as_exact_as_sequential_fma(gpu: Any, k: int, splits: int) -> None:
    fma = BlockGemm((1, M, N, k), np.dtype(np.float32), FMA_TILES[4][0], 1, (False, False)).kernel()
    for case, (a, b) in cases(M, N, k).items():
        found = multiplied(gpu, (1, M, N, k), a[None], b[None], 64, splits)[0]
        plain = computed(gpu, matmul_p, fma, [a[None], b[None]], transpose_a=False, transpose_b=False)[0]
        (largest, norm), of_fma = errors(found, a, b), errors(plain, a, b)
        assert largest <= max(NOISE * of_fma[0], OF_TENSOR_CORES), case
        assert norm <= max(NOISE * of_fma[1], TWO_ROUNDINGS), case


@pytest.mark.parametrize("splits", [1, 3])
def test_infinity_and_nan_propagate_as_in_float32(gpu: Any, splits: int) -> None:
    a, b = operands((1, M, N, 300), False, False, "float32")
    a[0, 0, 0], a[0, 1, 7], a[0, 130, 9], b[0, 5, 3] = np.inf, np.nan, -np.inf, np.inf
    a[0, 4] = 0
    with np.errstate(all="ignore"):
        expected = np.matmul(a, b)
    found = multiplied(gpu, (1, M, N, 300), a, b, 96, splits)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
