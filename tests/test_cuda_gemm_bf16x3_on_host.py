"""`gemm/gemm_bf16x3.cu`, emulated on the CPU, against the reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from cuda_on_host import Host, host

from adtrain.backends.cuda import H200
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.bf16x3 import Bf16x3Gemm, Bf16x3Tile
from adtrain.ops.matmul import matmul_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TOLERANCE = 5e-7
"""Of the norm of the difference over the norm."""
FLAGS = tuple(product((False, True), repeat=2))


def drawn(batch: int, m: int, n: int, k: int, ta: bool, tb: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(m)
    shapes = ((batch, k, m) if ta else (batch, m, k), (batch, n, k) if tb else (batch, k, n))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def check(
    host: Host, arrays: list[np.ndarray], ta: bool, tb: bool, columns: int, splits: int, multiprocessors: int = 2
) -> None:
    a, b = (x.swapaxes(1, 2) if transposed else x for x, transposed in zip(arrays, (ta, tb), strict=True))
    (batch, m, k), n = a.shape, b.shape[2]
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    out = Variable(ArrayType((batch, m, n), a.dtype), "gpu")
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "full"}
    target = H200._replace(multiprocessors=multiprocessors)
    kernel = Bf16x3Gemm(target, (batch, m, n, k), Bf16x3Tile(columns), splits, (ta, tb)).kernel()
    found = host.computed(Equation(matmul_p, inputs, params, (out,)), kernel, arrays)[0]
    with np.errstate(invalid="ignore"):
        expected = a.astype(float) @ b.astype(float)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    assert np.linalg.norm(found[held] - expected[held]) <= TOLERANCE * np.linalg.norm(expected[held])


@pytest.mark.parametrize(
    ("multiprocessors", "columns", "splits", "ta", "tb"),
    [
        (2, 72, 3, False, True),
        pytest.param(132, 128, 1, True, False, marks=pytest.mark.exhaustive),
        pytest.param(132, 64, 1, False, False, marks=pytest.mark.exhaustive),
        pytest.param(2, 96, 2, True, True, marks=pytest.mark.exhaustive),
    ],
)
def test_products_are_right_whether_blocks_have_one_tile_or_several(
    host: Host, multiprocessors: int, columns: int, splits: int, ta: bool, tb: bool
) -> None:
    """Two matrices, with partial tiles in all directions."""
    check(host, drawn(2, 140, 148, 76 if splits == 1 else 180, ta, tb), ta, tb, columns, splits, multiprocessors)


@pytest.mark.parametrize(("ta", "tb"), [(False, False), (True, True)])
def test_rows_need_no_alignment(host: Host, ta: bool, tb: bool) -> None:
    check(host, drawn(1, 67, 69, 65, ta, tb), ta, tb, 64, 1)


def test_several_threads_add_the_splits_of_an_element(host: Host) -> None:
    check(host, drawn(1, 66, 70, 680, True, False), True, False, 64, 21)


def test_infinity_and_nan_propagate_as_in_float32(host: Host) -> None:
    a, b = drawn(1, 130, 140, 68, False, True)
    a[0, 1, 4], a[0, 129, 3], a[0, 64, 2], b[0, 139, 3] = np.nan, -np.inf, np.inf, np.inf
    a[0, 4] = 0
    check(host, [a, b], False, True, 96, 2)
