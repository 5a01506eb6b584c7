"""The kernels for products of packed operands, emulated on the CPU, against the reference."""

from __future__ import annotations

from itertools import product
from typing import TypeAlias

import numpy as np
import pytest
from cuda_on_host import Host, host
from product_samples import NOISE, OF_FP16X2, errors, hard, sequential_fma
from sweeps import spread
from test_gpu_products import adversarial

from adtrain.backends.cuda import H200
from adtrain.core.precision import rounded
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.packed import PACKED_TILES, PackedGemm, PackedTile
from adtrain.ops.matmul import matmul_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TOLERANCE = 5e-7
"""Of the norm of the difference over the norm, operands rounded beforehand."""
TILES = tuple((precision, x) for precision, several in PACKED_TILES.items() for x in several if x.packs_b)
DIRECT_TILES = tuple(tile for several in PACKED_TILES.values() for tile in several if not tile.packs_b)
FULL_TILES = [
    pytest.param(tile, marks=pytest.mark.exhaustive if i else ()) for i, tile in enumerate(PACKED_TILES["full"])
]
FLAGS = tuple(product((False, True), repeat=2))
Lengths: TypeAlias = "tuple[int, int, int, int]"
"""Batch, M, N and K."""
TARGET = H200._replace(multiprocessors=2)
"""With few multiprocessors a block computes several tiles."""


def drawn(lengths: Lengths, ta: bool, tb: bool) -> tuple[np.ndarray, np.ndarray]:
    batch, m, n, k = lengths
    rng = np.random.default_rng(m)
    shapes = ((batch, k, m) if ta else (batch, m, k), (batch, n, k) if tb else (batch, k, n))
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return a, b


def straight(ta: bool, tb: bool, *arrays: np.ndarray) -> list[np.ndarray]:
    """The operands, not transposed."""
    return [x.swapaxes(1, 2) if transposed else x for x, transposed in zip(arrays, (ta, tb), strict=True)]


def product_of(
    host: Host, precision: str, tile: PackedTile, ta: bool, tb: bool, *arrays: np.ndarray, splits: int = 1
) -> np.ndarray:
    a, b = straight(ta, tb, *arrays)
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    batch, m, k = a.shape
    n = b.shape[2]
    out = Variable(ArrayType((batch, m, n), a.dtype), "gpu")
    params = {"transpose_a": ta, "transpose_b": tb, "precision": precision}
    kernel = PackedGemm(TARGET, (batch, m, n, k), tile, (ta, tb), splits).kernel()
    return host.computed(Equation(matmul_p, inputs, params, (out,)), kernel, arrays)[0]


def check(
    host: Host, precision: str, tile: PackedTile, ta: bool, tb: bool, *arrays: np.ndarray, splits: int = 1
) -> None:
    found = product_of(host, precision, tile, ta, tb, *arrays, splits=splits)
    a, b = straight(ta, tb, *arrays)
    with np.errstate(invalid="ignore"):
        expected = rounded(a, precision).astype(float) @ rounded(b, precision).astype(float)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    assert np.linalg.norm(found[held] - expected[held]) <= TOLERANCE * np.linalg.norm(expected[held])


@pytest.mark.parametrize(("choice", "transposed"), spread(TILES, FLAGS))
def test_products_are_right(host: Host, choice: tuple[str, PackedTile], transposed: tuple[bool, bool]) -> None:
    check(host, *choice, *transposed, *drawn((2, 140, 132, 100), *transposed))


@pytest.mark.parametrize("tile", DIRECT_TILES)
def test_products_of_operands_that_are_not_packed_are_right(host: Host, tile: PackedTile) -> None:
    check(host, "tf32", tile, False, True, *drawn((2, 140, 396, 100), False, True))


@pytest.mark.parametrize(
    ("precision", "tb"), [("tf32", True), pytest.param("bfloat16", False, marks=pytest.mark.exhaustive)]
)
def test_splits_of_k_are_added(host: Host, precision: str, tb: bool) -> None:
    check(host, precision, PACKED_TILES[precision][-1], False, tb, *drawn((2, 140, 132, 356), False, tb), splits=3)


@pytest.mark.parametrize("tile", FULL_TILES)
def test_sparse_products_are_right(host: Host, tile: PackedTile) -> None:
    """Computed in bf16x3, because few products make an element."""
    a, b = drawn((1, 130, 140, 200), True, False)
    check(host, "full", tile, True, False, a * (np.arange(a.size).reshape(a.shape) % 7 == 0).astype(np.float32), b)


@pytest.mark.exhaustive
@pytest.mark.exhaustive
@pytest.mark.parametrize("tile", FULL_TILES)
def test_infinity_and_nan_propagate_as_in_float32(host: Host, tile: PackedTile) -> None:
    a, b = drawn((1, 130, 140, 68), False, True)
    a[0, 1, 4], a[0, 129, 3], a[0, 64, 2], b[0, 139, 3] = np.nan, -np.inf, np.inf, np.inf
    a[0, 4] = 0
    check(host, "full", tile, False, True, a, b)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.exhaustive) for x in ("cancelling to 0.03", "denormal numbers")]
    + ["thirty decades"],
)
def test_products_with_their_fallback_are_as_exact_as_sequential_fma(host: Host, case: str) -> None:
    tile = PACKED_TILES["full"][0]
    m, n, k = 128, 64, tile.min_k
    a, b = (x.astype(np.float32) for x in {**adversarial(m, n, k), **hard(m, n, k)}[case])
    (found,) = product_of(host, "full", tile, False, False, a[None], b[None])
    taken, expected = errors(found, a, b), errors(sequential_fma(a, b), a, b)
    assert taken[0] <= max(NOISE * expected[0], OF_FP16X2)
    assert taken[1] <= NOISE * expected[1]
