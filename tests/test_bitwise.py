"""And, or, exclusive or and not, and boolean masks, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.core.types import DTYPES

EXACT = sorted((dtype for dtype in DTYPES if dtype.kind != "f"), key=str)
OPERATORS: list[Any] = [lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b]


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_operators_equal_numpy_eagerly_and_jitted(dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, 100).astype(dtype) for _ in range(2))
    for f in OPERATORS:
        for run in (f, ad.jit(f)):
            for x, y in ((ad.array(a), ad.array(b)), (a, ad.array(b)), (ad.array(a[:, None]), b)):
                found = run(x, y)
                assert isinstance(found, ad.Array)
                np.testing.assert_array_equal(found.numpy(), f(np.asarray(x), np.asarray(y)), strict=True)
    for run in (lambda x: ~x, ad.jit(lambda x: ~x)):
        np.testing.assert_array_equal(run(ad.array(a)).numpy(), ~a, strict=True)


def test_numbers_take_the_type_of_the_array() -> None:
    x = np.array([5, 6], np.int32)
    for found, expected in ((ad.array(x) & 4, x & 4), (1 | ad.array(x), 1 | x), (ad.array(x > 5) ^ True, x <= 5)):
        np.testing.assert_array_equal(found.numpy(), expected, strict=True)


@pytest.mark.parametrize("f", [*OPERATORS, lambda a, b: ~a], ids=["and", "or", "xor", "not"])
def test_floating_point_numbers_are_refused(f: Any) -> None:
    with pytest.raises(ad.DTypeError, match=r"^bitwise_\w+: found float32, expected integers or bool; "):
        f(ad.array([1.0]), ad.array([1]))


@given(st.integers(0, 3), st.integers(0, 999))
def test_a_boolean_mask_selects_as_in_numpy(axes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 2, 4))
    mask = rng.random(x.shape[: max(axes, 1)]) < rng.choice([0, 0.5, 1])
    for given_mask in (mask, ad.array(mask), mask.tolist()):
        np.testing.assert_array_equal(ad.array(x)[given_mask].numpy(), x[mask], strict=True)


def test_the_gradient_of_selected_elements_is_in_their_places() -> None:
    x = ad.array([-1.0, 2.0, 3.0])
    assert ad.grad(lambda x: (x[x > 0] ** 2).sum())(x).numpy().tolist() == [0, 4, 6]
    constant = np.array([True, False, True])
    assert ad.jit(ad.grad(lambda x: (x[constant] ** 2).sum()))(x).numpy().tolist() == [-2, 0, 6]


def test_masks_that_cannot_be_used_are_refused() -> None:
    x = ad.array(np.ones((2, 3), np.float32))
    with pytest.raises(ad.ShapeError, match=r"^indexing: found a boolean mask of shape \(3,\) for axes of lengths"):
        x[np.ones(3, np.bool_)]
    with pytest.raises(ad.ShapeError, match=r"^indexing: found 3 indices for shape \(2, 3\)$"):
        x[np.ones((2, 3), np.bool_), 0]
    with pytest.raises(ad.TraceError, match=r"test_bitwise\.py:\d+: indexing: .* use ops\.where$"):
        ad.jit(lambda x: ops.sum(x[x > 0]))(x)
