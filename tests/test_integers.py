"""Integers and bool: exact arithmetic that wraps around, the same in eager and compiled code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compiled_parity import both

import adtrain as ad
from adtrain import ops
from adtrain.core.staging import stage

TYPES = ("int64", "int32", "uint32", "uint8")
SMALL = (-7, -3, -2, -1, 0, 1, 2, 3, 7)


def pairs(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of small numbers and of those near the ends of the type."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    numbers = [n for n in SMALL if n >= low] + [low, low + 1, high - 1, high]
    a, b = np.array(list(itertools.product(numbers, numbers)), dtype).T.copy()
    return a, b


def quotient(a: int, b: int) -> int:
    return a // b if b else 0


def remainder(a: int, b: int) -> int:
    return a % b if b else 0


def power(a: int, b: int) -> int:
    if b < 0:
        return a**-b if abs(a) == 1 else 0
    return pow(a, b, 1 << 64)


EXACT: dict[str, tuple[Callable[..., Any], Callable[[int, int], int]]] = {
    "a + b": (lambda a, b: a + b, lambda a, b: a + b),
    "a - b": (lambda a, b: a - b, lambda a, b: a - b),
    "a * b": (lambda a, b: a * b, lambda a, b: a * b),
    "-a": (lambda a, b: -a, lambda a, b: -a),
    "abs(a)": (lambda a, b: abs(a), lambda a, b: abs(a)),
    "maximum": (ops.maximum, max),
    "minimum": (ops.minimum, min),
    "a // b": (lambda a, b: a // b, quotient),
    "a % b": (lambda a, b: a % b, remainder),
    "a // 3": (lambda a, b: a // 3, lambda a, b: a // 3),
    "a % 0": (lambda a, b: a % 0, lambda a, b: 0),
    "7 // a": (lambda a, b: 7 // a, lambda a, b: quotient(7, a)),
    "7 % a": (lambda a, b: 7 % a, lambda a, b: remainder(7, a)),
    "a ** b": (lambda a, b: a**b, power),
    "a ** 300": (lambda a, b: a**300, lambda a, b: pow(a, 300, 1 << 64)),
    "a ** 0": (lambda a, b: a**0, lambda a, b: 1),
    "round": (lambda a, b: ops.round(a), lambda a, b: a),
}  # fmt: skip


def wrapped(number: int, dtype: str) -> int:
    bits = np.iinfo(dtype).bits
    low = number % (1 << bits)
    return low - (1 << bits) if low > np.iinfo(dtype).max else low


@pytest.mark.compiled
def test_integer_arithmetic_is_that_of_python_wrapped_to_the_type() -> None:
    functions = {f"{dtype}, {name}": (f, pairs(dtype)) for dtype in TYPES for name, (f, _) in EXACT.items()}
    for name, found in both(functions).items():
        assert not isinstance(found, Exception), found
        dtype, _, operation = name.partition(", ")
        expected = [wrapped(EXACT[operation][1](int(a), int(b)), dtype) for a, b in zip(*pairs(dtype), strict=True)]
        for result in (found.eager[0], found.compiled[0]):
            assert result.dtype == dtype
            assert result.tolist() == expected, name


@pytest.mark.compiled
def test_products_of_integer_matrices_are_exact_and_wrap_around() -> None:
    rng = np.random.default_rng(0)
    functions: dict[str, Any] = {}
    for dtype, transpose_a, transpose_b in itertools.product(TYPES, (False, True), (False, True)):
        limits = np.iinfo(dtype)
        a = rng.integers(limits.min, limits.max, (2, 1, *((5, 3) if transpose_a else (3, 5))), dtype, endpoint=True)
        b = rng.integers(limits.min, limits.max, (3, *((4, 5) if transpose_b else (5, 4))), dtype, endpoint=True)

        def product(x: Any, y: Any, transpose_a: bool = transpose_a, transpose_b: bool = transpose_b) -> Any:
            return ops.matmul(x, y, transpose_a, transpose_b)

        functions[f"{dtype}, {transpose_a}, {transpose_b}"] = product, (a, b)
    functions["vectors, False, False"] = ops.matmul, (np.arange(5), np.arange(5))
    functions["empty, False, False"] = ops.matmul, (np.ones((2, 0), int), np.ones((0, 3), int))
    for name, found in both(functions).items():
        assert not isinstance(found, Exception), found
        transposed = name.split(", ")[1:]
        a, b = (x.swapaxes(-1, -2) if t == "True" else x for x, t in zip(functions[name][1], transposed, strict=True))
        for result in (found.eager[0], found.compiled[0]):
            np.testing.assert_array_equal(result, a @ b, strict=True)


LOGIC: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a + b": (lambda a, b: a + b, np.logical_or),
    "a * b": (lambda a, b: a * b, np.logical_and),
    "maximum": (ops.maximum, np.logical_or),
    "minimum": (ops.minimum, np.logical_and),
    "a + True": (lambda a, b: a + True, lambda a, b: np.ones_like(a)),
    "a + 1": (lambda a, b: a + 1, lambda a, b: a + 1),
    "a ** 2": (lambda a, b: a**2, lambda a, b: a.astype(np.int64)),
    "a - 1": (lambda a, b: a - 1, lambda a, b: a - 1),
}


@pytest.mark.compiled
def test_sums_and_products_of_bool_are_or_and_and() -> None:
    a, b = np.array(list(itertools.product((False, True), repeat=2))).T.copy()
    for name, found in both({name: (f, (a, b)) for name, (f, _) in LOGIC.items()}).items():
        assert not isinstance(found, Exception), found
        for result in (found.eager[0], found.compiled[0]):
            np.testing.assert_array_equal(result, LOGIC[name][1](a, b), strict=True)


MASK = np.array([True, False])


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda: ad.array(MASK) - MASK, "sub: found bool, expected numbers; use astype, or not_equal for exclusive or"),
        (lambda: -ad.array(MASK), "neg: found bool, expected numbers; use astype, or equal.x, False. for not"),
        (lambda: ad.array(MASK) // MASK, "floor_divide: found bool, expected numbers; use astype"),
        (lambda: ad.array(MASK) % MASK, "remainder: found bool, expected numbers; use astype"),
        (lambda: ops.matmul(MASK, MASK), "matmul: found bool, expected numbers; use astype"),
        (lambda: ops.floor(MASK), "floor: found bool, expected float32 or float64; use astype"),
        (lambda: ad.array([2, 3]) ** -1, "power: found exponent -1 for int64; use -1.0 or astype"),
        (lambda: ad.array([2, 3]) ** 2**64, "power: found 18446744073709551616 for elements of type int64"),
    ],
)
def test_what_bool_and_integers_do_not_have_is_an_error(f: Callable[[], Any], message: str) -> None:
    for run in (f, stage(f)):
        with pytest.raises(ad.DTypeError, match=message):
            run()


def test_powers_of_integers_with_a_floating_point_exponent_are_float32() -> None:
    found = ad.array([1, 2]) ** -1.0
    assert found.dtype == np.float32
    assert found.numpy().tolist() == [1, 0.5]
