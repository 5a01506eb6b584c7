"""Products that cut operands in pieces on the way: the kernel, on the CPU, against the reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from cuda_on_host import Host, host

from adtrain.core.chip import CHIP
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.bf16x3 import Cut, PieceProduct
from adtrain.ops.matmul import matmul_p

__all__ = ["host"]

TOLERANCE = 5e-7
"""Of the norm of the difference over the norm."""
FLAGS = tuple(product((False, True), repeat=2))


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that blocks go from tile to tile."""
    monkeypatch.setattr(CHIP, "multiprocessors", 2)


def drawn(batch: int, m: int, n: int, k: int, ta: bool, tb: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(m)
    shapes = ((batch, k, m) if ta else (batch, m, k), (batch, n, k) if tb else (batch, k, n))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def check(host: Host, arrays: list[np.ndarray], ta: bool, tb: bool, columns: int, parts: int) -> None:
    a, b = (x.swapaxes(1, 2) if turned else x for x, turned in zip(arrays, (ta, tb), strict=True))
    (batch, m, k), n = a.shape, b.shape[2]
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    out = Variable(ArrayType((batch, m, n), a.dtype), "gpu")
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "full"}
    kernel = PieceProduct((batch, m, n, k), Cut(columns), parts, (ta, tb)).kernel()
    found = host.computed(Equation(matmul_p, inputs, params, (out,)), kernel, arrays)[0]
    with np.errstate(invalid="ignore"):
        expected = a.astype(float) @ b.astype(float)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    assert np.linalg.norm(found[held] - expected[held]) <= TOLERANCE * np.linalg.norm(expected[held])


@pytest.mark.parametrize("multiprocessors", [2, 132])
@pytest.mark.parametrize(
    ("columns", "parts", "ta", "tb"),
    [(64, 1, False, False), (72, 3, False, True), (128, 1, True, False), (96, 2, True, True)],
)
def test_products_are_right_whether_blocks_have_one_tile_or_several(
    host: Host, multiprocessors: int, columns: int, parts: int, ta: bool, tb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two matrices, whose tiles have ends in all directions."""
    monkeypatch.setattr(CHIP, "multiprocessors", multiprocessors)
    check(host, drawn(2, 140, 148, 76 if parts == 1 else 180, ta, tb), ta, tb, columns, parts)


@pytest.mark.parametrize(("ta", "tb"), FLAGS)
@pytest.mark.parametrize(("m", "n", "k"), [(67, 69, 65), (130, 66, 70)])
def test_lines_may_begin_anywhere(host: Host, m: int, n: int, k: int, ta: bool, tb: bool) -> None:
    check(host, drawn(1, m, n, k, ta, tb), ta, tb, 64, 1)


@pytest.mark.parametrize("parts", [16, 21])
def test_elements_of_many_parts_are_shared_by_threads(host: Host, parts: int) -> None:
    check(host, drawn(1, 66, 70, 680, True, False), True, False, 64, parts)


@pytest.mark.parametrize("parts", [1, 2])
def test_infinity_and_nan_go_where_they_go_in_plain_sums(host: Host, parts: int) -> None:
    a, b = drawn(1, 130, 140, 68, False, True)
    a[0, 1, 4], a[0, 129, 3], a[0, 64, 2], b[0, 139, 3] = np.nan, -np.inf, np.inf, np.inf
    a[0, 4] = 0
    check(host, [a, b], False, True, 96, parts)
