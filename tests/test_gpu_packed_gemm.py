"""The GPU: products of packed operands are right for all shapes, and as exact as sequential float32 FMA."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from gpu_parity import gpu, hopper, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from product_samples import NOISE, OF_FP16X2, errors, hard
from test_gpu_products import adversarial, computed, distance, exact, operands, rounded

from adtrain import ops
from adtrain.core import kernel as registry
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel
from adtrain.core.staging import stage
from adtrain.lowering.cuda.gemm import BlockGemm
from adtrain.lowering.cuda.gemm.packed import PACKED_TILES, PackedGemm, PackedTile
from adtrain.lowering.cuda.gemm.tiles import FMA_TILES
from adtrain.ops.matmul import matmul_p
from adtrain.passes import ALL

__all__ = ["gpu", "hopper", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = {"full": 5e-7, "tf32": 1e-5, "bfloat16": 1e-5}
"""The norm of the difference relative to that of sums without cancellation, operands rounded beforehand. K is up to
1500, where sequential FMA is off by 8e-7, and results have as few as one element."""
TILES = tuple((precision, x) for precision, several in PACKED_TILES.items() for x in several if x.packs_b)
DIRECT_TILES = tuple(tile for several in PACKED_TILES.values() for tile in several if not tile.packs_b)
M, N, K = 256, 192, PACKED_TILES["full"][0].min_k

Lengths: TypeAlias = "tuple[int, int, int, int]"
"""Batch, M, N and K."""


def packed(
    gpu: Any, shape: Lengths, tile: PackedTile = PACKED_TILES["full"][0], ta: bool = False, tb: bool = False
) -> CudaKernel:
    return PackedGemm(gpu.lowering.target, shape, tile, (ta, tb)).kernel()


def plain(gpu: Any, shape: Lengths) -> CudaKernel:
    """Sequential FMA."""
    return BlockGemm(shape, np.dtype("float32"), FMA_TILES[4][0], 1, (False, False)).kernel()


def multiplied(gpu: Any, kernel: CudaKernel, a: np.ndarray, b: np.ndarray, ta: bool = False, tb: bool = False) -> Any:
    return computed(gpu, matmul_p, kernel, [a, b], transpose_a=ta, transpose_b=tb)


@pytest.mark.slow
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(("precision", "tile"), TILES)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 400), st.integers(1, 600), st.integers(1, 1500)))
def test_products_of_all_shapes_are_right(
    gpu: Any, shape: Lengths, precision: str, tile: PackedTile, ta: bool, tb: bool
) -> None:
    a, b = operands(shape, ta, tb, "float32")
    found = multiplied(gpu, packed(gpu, shape, tile, ta, tb), a, b, ta, tb)
    a, b = rounded(a, precision).astype(float), rounded(b, precision).astype(float)
    size = np.linalg.norm(np.sqrt(exact(a * a, b * b, ta, tb)))
    assert np.linalg.norm(found - exact(a, b, ta, tb)) < TOLERANCE[precision] * size


@pytest.mark.parametrize("tile", DIRECT_TILES)
@pytest.mark.parametrize("shape", [(2, 140, 396, 100), (1, 1030, 1500, 1024)])
def test_products_of_operands_that_are_not_packed_are_right(gpu: Any, shape: Lengths, tile: PackedTile) -> None:
    a, b = operands(shape, False, True, "float32")
    found = multiplied(gpu, packed(gpu, shape, tile, False, True), a, b, False, True)
    expected = exact(rounded(a, "tf32").astype(float), rounded(b, "tf32").astype(float), False, True)
    assert distance(found, expected) < TOLERANCE["tf32"]


@pytest.mark.parametrize("tile", PACKED_TILES["full"])
def test_a_block_computes_several_tiles(gpu: Any, tile: PackedTile) -> None:
    shape = (3, 1030, 1500, 140)
    a, b = operands(shape, False, False, "float32")
    assert distance(multiplied(gpu, packed(gpu, shape, tile), a, b), exact(a, b, False, False)) < TOLERANCE["full"]


@pytest.mark.slow
def test_they_are_as_exact_as_sequential_fma(gpu: Any) -> None:
    for case, arrays in {**adversarial(M, N, K), **hard(M, N, K)}.items():
        a, b = (x.astype(np.float32) for x in arrays)
        found, fma = (
            errors(multiplied(gpu, kernel(gpu, (1, M, N, K)), a[None], b[None])[0], a, b) for kernel in (packed, plain)
        )
        assert found[0] <= max(NOISE * fma[0], OF_FP16X2), case
        assert found[1] <= NOISE * fma[1], case


def test_infinity_and_nan_propagate_as_in_float32(gpu: Any) -> None:
    a, b = operands((1, M, N, K), False, False, "float32")
    a[0, 0, 0], a[0, 1, 7], a[0, 130, 9], b[0, 5, 3] = np.inf, np.nan, -np.inf, np.inf
    a[0, 4] = 0
    with np.errstate(all="ignore"):
        expected = np.matmul(a, b)
    for _, tile in TILES:
        found = multiplied(gpu, packed(gpu, (1, M, N, K), tile), a, b)
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(found), test(expected))


def test_results_above_the_range_of_float32_are_infinite(gpu: Any) -> None:
    a, b = np.full((1, M, K), 1e25, np.float32), np.full((1, K, N), 1e15, np.float32)
    assert np.isposinf(multiplied(gpu, packed(gpu, (1, M, N, K)), a, b)).all()


@pytest.mark.parametrize("off", [1.0, 1e-4])
@pytest.mark.parametrize("tile", PACKED_TILES["full"])
def test_the_epilogue_runs_once_for_each_element(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tile: PackedTile, off: float
) -> None:
    """The fallback computes a first tile as a whole, and elements of another; where products cancel, all tiles."""
    rng = np.random.default_rng(0)
    weight, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, N), (M, K), (K, N)))
    a[:, 1::2] = -a[:, ::2] * (1 + off * rng.standard_normal((M, K // 2)))
    b[1::2] = b[::2]
    a[3, 7] = np.inf
    kernel = packed(gpu, (1, M, N, K), tile)
    monkeypatch.setitem(registry._CUDA_RULES, "matmul", lambda *_, **__: [kernel])
    update = stage(lambda weight, a, b: weight - 0.5 * ops.matmul(a, b), ALL, donate=(0,))
    found = update(*(array(x, device="gpu") for x in (weight, a, b))).numpy()
    expected = weight - 0.5 * exact(a, b, False, False)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.sqrt(K))
