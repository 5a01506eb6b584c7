"""Normalisation, standard deviations and logsumexp of numbers that are all alike, near one another, or infinite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from program_samples import ALL

import adtrain as ad
from adtrain import ops
from adtrain.core.staging import stage

pytestmark = pytest.mark.compiled

SHAPE = (6, 4, 50)


def batch_norm(x: Any) -> Any:
    zeros = ops.zeros(x.shape[1], x.dtype)
    return ops.batch_norm(x, zeros, zeros + 1.0, training=True)[0]


NORMS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "layer_norm": (lambda x: ops.layer_norm(x, x.shape[-1:]), (2,)),
    "layer_norm of two axes": (lambda x: ops.layer_norm(x, x.shape[-2:]), (1, 2)),
    "group_norm": (lambda x: ops.reshape(ops.group_norm(x, 2), (6, 2, 100)), (2,)),
    "batch_norm": (batch_norm, (0, 2)),
    "batch_norm of columns": (lambda x: batch_norm(ops.reshape(x, (24, 50))), (0,)),
}
SHAPES = {"group_norm": (6, 2, 100), "batch_norm of columns": (24, 50)}
FORMS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "compiled": lambda f: stage(f, ALL)}
FORMS_OF_TYPES = [
    ("eager", "float32"),
    ("eager", "float64"),
    ("compiled", "float32"),
    pytest.param("compiled", "float64", marks=pytest.mark.exhaustive),
]


def value_and_gradient(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def work(x: Any, ct: Any) -> Any:
        out, pullback = ad.vjp(f, x)
        return out, *pullback(ct)

    return work


def exact(x: np.ndarray, ct: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The normalised numbers and the gradient, in long double."""
    x, ct = x.astype(np.longdouble), ct.astype(np.longdouble)
    x = x - x[tuple(np.s_[:1] if i in axes else np.s_[:] for i in range(x.ndim))]
    deviation = x - x.mean(axes, keepdims=True)
    sigma = np.sqrt((deviation**2).mean(axes, keepdims=True) + 1e-5)
    y = deviation / sigma
    return y, (ct - ct.mean(axes, keepdims=True) - y * (ct * y).mean(axes, keepdims=True)) / sigma


@pytest.mark.parametrize(("form", "dtype"), FORMS_OF_TYPES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_equal_numbers_are_zero(name: str, form: str, dtype: str) -> None:
    norm = FORMS[form](NORMS[name][0])
    for number in (100000.1, -0.1, 1e15, 16777217 / 3):
        assert not norm(np.full(SHAPE, number, dtype)).numpy().any()


@pytest.mark.parametrize(("form", "dtype"), FORMS_OF_TYPES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_and_their_gradients_are_exact_at_every_scale(name: str, form: str, dtype: str) -> None:
    f, axes = NORMS[name]
    work, rng = FORMS[form](value_and_gradient(f)), np.random.default_rng(0)
    shape, eps = SHAPES.get(name, SHAPE), float(np.finfo(dtype).eps)
    scales = [(0, 1), (0, 1e-20), (0, 1e15), (1e15, 1e14), (1e15, 1e10), (1e4, 1e-1), (-3.0, 1e-4)]
    if dtype == "float64":
        scales += [(0, 1e100), (1e100, 1e99), (1e15, 1e3)]
    for shift, scale in scales:
        x = (shift + scale * rng.normal(size=SHAPE)).astype(dtype)
        ct = rng.normal(size=shape).astype(dtype)
        for found, expected in zip(work(x, ct), exact(x.reshape(shape), ct, axes), strict=True):
            error = np.abs(found.numpy().reshape(shape) - expected).max()
            assert error <= 100 * eps * np.abs(expected).max(), (shift, scale)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_deviation_of_equal_numbers_and_its_gradient_are_zero(form: str, dtype: str) -> None:
    work = FORMS[form](value_and_gradient(lambda x: ops.std(x, -1)))
    for number in (100000.1, 0.1, 1e15):
        for found in work(np.full(SHAPE, number, dtype), np.ones(SHAPE[:-1], dtype)):
            assert not found.numpy().any()


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_logsumexp_is_0_for_finite_numbers_if_another_is_infinite(form: str) -> None:
    x = np.array([[np.inf, 1, 2], [3, np.inf, np.inf], [-np.inf, 0, 0], [1, 2, 3]])
    found, gradient = (y.numpy() for y in FORMS[form](value_and_gradient(lambda x: ops.logsumexp(x, 1)))(x, np.ones(4)))
    softmax = np.exp(x[3] - found[3])
    assert found[:2].tolist() == [math.inf, math.inf]
    np.testing.assert_allclose(gradient, [[np.nan, 0, 0], [0, np.nan, np.nan], [0, 0.5, 0.5], softmax], rtol=1e-12)
