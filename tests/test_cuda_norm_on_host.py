"""The kernels of `standardize` for rows that do not fit into registers, emulated on the CPU, against long double."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_host import Host, assert_same_in_another_order, host

from adtrain.backends.cuda import H200
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.ops.normalisation import standardize_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

EPS = 1e-5
CASES = {
    "runs of single elements": ((20, 3, 7, 7), (0, 2, 3)),
    "runs shorter than a block": ((9, 2, 12, 12), (0, 2, 3)),
    "runs as long as a block": ((3, 2, 32, 32), (0, 2, 3)),
    "runs longer than a block": ((3, 2, 40, 32), (0, 2, 3)),
    "several parts": ((80, 1, 16, 16), (0, 2, 3)),
    "a long row": ((2, 17000), (1,)),
    "columns": ((700, 40), (0,)),
    "few columns": ((2, 5, 3), (1,)),
}
"""Shapes and axes."""
BY_CASE = pytest.mark.parametrize(("shape", "axes"), CASES.values(), ids=CASES)
BY_DTYPE = pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.exhaustive)])


def standardized(host: Host, x: np.ndarray, axes: tuple[int, ...]) -> list[np.ndarray]:
    """The result, the means and the variances by the three launches."""
    given = ArrayType(x.shape, x.dtype)
    outputs = standardize_p.shape(given, axes=axes, eps=EPS)
    params = {"axes": axes, "eps": EPS}
    equation = Equation(standardize_p, (Variable(given, "gpu"),), params, tuple(Variable(t, "gpu") for t in outputs))
    *_, kernel = cuda_kernels("standardize", H200, given, **params)
    assert kernel.launches[0].name == "standardize_parts"
    return host.computed(equation, kernel, [x])


def exact(x: np.ndarray, axes: tuple[int, ...]) -> list[np.ndarray]:
    wide = x.astype(np.longdouble)
    mean = wide.mean(axes, keepdims=True)
    variance = ((wide - mean) ** 2).mean(axes, keepdims=True)
    return [(wide - mean) / np.sqrt(variance + EPS), mean, variance]


@BY_CASE
@BY_DTYPE
def test_results_means_and_variances_are_those_of_long_double(
    host: Host, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str
) -> None:
    rng, eps = np.random.default_rng(0), float(np.finfo(dtype).eps)
    for shift, scale in ((0, 1), (3, 2), (0, 1e-15), (-1e3, 1e3)):
        x = (shift + scale * rng.normal(size=shape)).astype(dtype)
        (y, mean, variance), (y0, mean0, variance0) = standardized(host, x, axes), exact(x, axes)
        size = abs(shift) + scale
        assert np.abs(mean - mean0).max() <= 4 * eps * size
        np.testing.assert_allclose(variance, variance0, rtol=20 * eps)
        np.testing.assert_allclose(y, y0, rtol=0, atol=40 * eps * np.abs(y0).max())


@BY_CASE
@BY_DTYPE
def test_equal_numbers_become_zero(host: Host, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> None:
    for number in (100000.1, -0.1, 1e15, 16777217 / 3):
        x = np.full(shape, number, dtype)
        y, mean, variance = standardized(host, x, axes)
        assert not y.any()
        assert not variance.any()
        assert (mean == x.flat[0]).all()


@BY_CASE
@pytest.mark.parametrize("index", [0, -1], ids=["first", "last"])
def test_variances_with_an_outlier_are_as_exact(
    host: Host, shape: tuple[int, ...], axes: tuple[int, ...], index: int
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for outlier in (30.0, 1e4, 1e12):
        x[tuple(index if i in axes else np.s_[:] for i in range(x.ndim))] = outlier
        _, _, variance = standardized(host, x, axes)
        np.testing.assert_allclose(variance, exact(x, axes)[2], rtol=20 * float(np.finfo(np.float32).eps))


def test_the_order_of_threads_changes_no_bit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(30, 2, 12, 12)).astype(np.float32)
    assert_same_in_another_order(host, lambda: standardized(host, x, (0, 2, 3)), monkeypatch)
