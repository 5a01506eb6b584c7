"""The GPU: products that cut operands in pieces on the way are right for all shapes, and as exact as plain float32."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planes_emulated import cases
from packed_gemm_emulated import NOISE, OF_UNITS, TWO_ROUNDINGS, errors
from test_gpu_products import computed, distance, exact, operands

from adtrain.lowering.cuda.gemm.bf16x3 import WIDTHS, Cut, PieceProduct
from adtrain.lowering.cuda.gemm.matmul import Product
from adtrain.lowering.cuda.gemm.packed import CAPABILITY
from adtrain.lowering.cuda.gemm.tiles import TILES
from adtrain.ops.matmul import matmul_p

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = 5e-7
"""Of the norm of the difference over that of sums of so many such products that do not cancel."""
M, N = 256, 192

Lengths: TypeAlias = "tuple[int, int, int, int]"
"""Batch, M, N and K."""


@pytest.fixture(autouse=True)
def hopper(gpu: Any) -> None:
    if gpu.device.device.compute_capability() != CAPABILITY:
        pytest.skip("there are such products on GPUs of compute capability 9.0 alone")


def multiplied(
    gpu: Any, shape: Lengths, a: np.ndarray, b: np.ndarray, width: int, parts: int, ta: bool = False, tb: bool = False
) -> Any:
    kernel = PieceProduct(shape, Cut(width), parts, (ta, tb)).kernel()
    return computed(gpu, matmul_p, kernel, [a, b], transpose_a=ta, transpose_b=tb)


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 400), st.integers(1, 600), st.integers(1, 1500)),
    parts=st.integers(1, 6),
)
def test_products_of_all_shapes_are_right(gpu: Any, shape: Lengths, width: int, parts: int, ta: bool, tb: bool) -> None:
    """540 in all."""
    a, b = operands(shape, ta, tb, "float32")
    found = multiplied(gpu, shape, a, b, width, min(parts, -(-shape[-1] // 32)), ta, tb)
    x, y = a.astype(float), b.astype(float)
    size = np.linalg.norm(np.sqrt(exact(x * x, y * y, ta, tb)))
    assert np.linalg.norm(found - exact(a, b, ta, tb)) < TOLERANCE * size


def test_a_block_goes_from_tile_to_tile(gpu: Any) -> None:
    shape = (3, 1030, 1500, 140)
    a, b = operands(shape, False, False, "float32")
    assert distance(multiplied(gpu, shape, a, b, 128, 2), exact(a, b, False, False)) < TOLERANCE


@pytest.mark.parametrize(("k", "parts"), [(128, 1), (256, 2), (576, 1), (1024, 4)])
@pytest.mark.parametrize("case", cases(M, N, 128))
def test_products_are_as_exact_as_one_chain_of_multiply_adds(gpu: Any, case: str, k: int, parts: int) -> None:
    a, b = cases(M, N, k)[case]
    found = multiplied(gpu, (1, M, N, k), a[None], b[None], 64, parts)[0]
    chain = Product((1, M, N, k), 4, TILES[4][0], 1, (False, False)).kernel()
    plain = computed(gpu, matmul_p, chain, [a[None], b[None]], transpose_a=False, transpose_b=False)[0]
    (largest, norm), of_chain = errors(found, a, b), errors(plain, a, b)
    assert largest <= max(NOISE * of_chain[0], OF_UNITS)
    assert norm <= max(NOISE * of_chain[1], TWO_ROUNDINGS)


@pytest.mark.parametrize("parts", [1, 3])
def test_infinity_and_nan_go_where_they_go_in_plain_sums(gpu: Any, parts: int) -> None:
    a, b = operands((1, M, N, 300), False, False, "float32")
    a[0, 0, 0], a[0, 1, 7], a[0, 130, 9], b[0, 5, 3] = np.inf, np.nan, -np.inf, np.inf
    a[0, 4] = 0
    with np.errstate(all="ignore"):
        expected = np.matmul(a, b)
    found = multiplied(gpu, (1, M, N, 300), a, b, 96, parts)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
