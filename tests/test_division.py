"""Floor division, remainder, rounding, and tests for NaN and infinity, on special values and against PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from compiled_parity import both
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops

SPECIAL = (0.0, 1.0, 0.1, 0.3, 0.5, 1.5, 2.5, 7.0, 8388609.0, 16777216.0, 1e-40, 1e30, np.inf)
BINARY = {"a // b": lambda a, b: a // b, "a % b": lambda a, b: a % b}
UNARY = {name: getattr(ops, name) for name in ("floor", "ceil", "trunc", "round", "isnan", "isfinite", "isinf")}


def special_pairs(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    numbers = [*SPECIAL, *(-x for x in SPECIAL), np.nan]
    a, b = np.array(list(itertools.product(numbers, numbers)), dtype).T.copy()
    return a, b


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError unless both are equal, with the same sign of zeros."""
    np.testing.assert_array_equal(found, expected, strict=True)
    np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_values_are_the_same_in_eager_and_compiled_code(dtype: str) -> None:
    functions: dict[str, Any] = {name: (f, special_pairs(dtype)) for name, f in BINARY.items()}
    functions |= {name: (f, special_pairs(dtype)[:1]) for name, f in UNARY.items()}
    for found in both(functions).values():
        assert not isinstance(found, Exception), found
        assert_same(found.compiled[0], found.eager[0])


@pytest.mark.needs_torch
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_special_values_equal_pytorch(dtype: str) -> None:
    import torch

    a, b = special_pairs(dtype)
    a, b = (x[np.abs(b) != np.float32(1e-40)] for x in (a, b))  # PyTorch's float32 remainder by it is NaN
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    for name, f in UNARY.items():
        np.testing.assert_array_equal(f(a).numpy(), getattr(torch, name)(x).numpy(), strict=True)
    np.testing.assert_array_equal((ad.array(a) % b).numpy(), torch.remainder(x, y).numpy(), strict=True)
    np.testing.assert_array_equal((ad.array(a) // b).numpy(), torch.floor_divide(x, y).numpy(), strict=True)


NUMBERS = st.floats(width=64, allow_nan=False, allow_infinity=False)


@given(NUMBERS, NUMBERS.filter(bool))
def test_floor_division_of_float64_is_that_of_python(a: float, b: float) -> None:
    x = ad.array(np.array(a))
    try:
        expected = np.array([a // b, a % b])
    except OverflowError:
        return
    assert_same(np.array([(x // b).item(), (x % b).item()]), expected)


def test_operators_take_numbers_on_either_side() -> None:
    x = ad.array([2.0, -3.0])
    assert [(x // 2).numpy().tolist(), (7 // x).numpy().tolist()] == [[1, -2], [3, -3]]
    assert [(x % 2).numpy().tolist(), (7 % x).numpy().tolist()] == [[0, 1], [1, -2]]


def test_rounding_takes_ties_to_even_and_keeps_integers() -> None:
    assert ops.round(np.array([0.5, 1.5, 2.5, -0.5, -1.5])).numpy().tolist() == [0, 2, 2, 0, -2]
    large = np.array([2**53 + 1, -(2**63)])
    for f in (ops.floor, ops.ceil, ops.trunc, ops.round):
        np.testing.assert_array_equal(f(large).numpy(), large, strict=True)


def test_a_remainder_has_the_gradients_of_a_minus_b_times_the_quotient() -> None:
    a, b = ad.grad(lambda a, b: ops.sum(a % b), (0, 1))(np.array([7.5, -7.5]), np.array([2.0, 2.0]))
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([1, 1], [-3, 4])
    a, b = ad.grad(lambda a, b: ops.sum(a // b), (0, 1))(np.array([7.5]), np.array([2.0]))
    assert (a.item(), b.item()) == (0, 0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_derivatives_of_hypot_and_arctan2_neither_overflow_nor_underflow(scale: float) -> None:
    point = [np.array(x * scale, np.float32) for x in (3, 4)]
    assert [x.item() for x in ad.grad(ops.hypot, (0, 1))(*point)] == pytest.approx([0.6, 0.8])
    slopes = ad.grad(ops.arctan2, (0, 1))(*point)
    assert [x.item() * scale for x in slopes] == pytest.approx([0.16, -0.12])


def test_the_derivatives_of_arctan2_at_the_origin_are_zero() -> None:
    assert [x.item() for x in ad.grad(ops.arctan2, (0, 1))(np.zeros(()), np.zeros(()))] == [0, 0]
