"""Transformations of jitted functions, two and three deep, compute what they do for plain functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops

Function = Callable[..., Any]
X = ad.array(np.array([0.5, -1.25]))


def cube(x: Any) -> Any:
    return ops.sum(x * x * x)


def custom(f: Function) -> Function:
    return ad.custom_vjp(lambda x: (f(x), x), lambda x, ct: (ct * ad.grad(f)(x),))


def custom_around(f: Function) -> Function:
    """`custom_vjp` around the function itself, which returns its output and its residuals."""

    @functools.wraps(f)
    def with_residuals(x: Any) -> tuple[Any, Any]:
        return f(x), x

    return ad.custom_vjp(with_residuals, lambda x, ct: (ct * ad.grad(f)(x),))


def wrapped(f: Function) -> Function:
    @functools.wraps(f)
    def doubled(x: Any) -> Any:
        return f(x) * 2.0

    return doubled


class Attributes:
    """A callable object that has all attributes of a function, as `functools.update_wrapper` copies them."""

    def __init__(self, f: Function) -> None:
        functools.update_wrapper(self, f)
        self.f = f

    def __call__(self, x: Any) -> Any:
        return self.f(x) - 1.0


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    "grad": ad.grad,
    "value_and_grad": ad.value_and_grad,
    "vmap": lambda f: functools.wraps(f)(lambda x: ad.vmap(f)(ops.stack([x, x * -0.5]))),
    "jacobian": ad.jacobian,
    "hessian": ad.hessian,
    "hvp": lambda f: functools.wraps(f)(lambda x: ad.hvp(f, (x,), (x * 0.5,))),
    "jvp": lambda f: functools.wraps(f)(lambda x: ad.jvp(f, (x,), (x * 0.5,))),
    "vjp": lambda f: functools.wraps(f)(lambda x: ad.vjp(f, x)[1](1.0)),
    "custom_vjp": custom,
    "custom_vjp of wraps": custom_around,
    "wraps": wrapped,
    "update_wrapper": Attributes,
}
"""Each makes of a function from a vector to a number a function of a vector."""


def to_number(f: Function) -> Function:
    """The sum of all results, so that the next transformation can follow."""

    @functools.wraps(f)
    def total(x: Any) -> Any:
        return sum((ops.sum(y * y) for y in ad.tree.leaves(f(x))), start=ops.zeros((), np.float64))

    return total


def chained(names: Sequence[str], jitted: Sequence[bool]) -> Function:
    """The transformations of `cube`, one after another; ``jitted`` says of `cube` and of each whether it is jitted."""
    f: Function = ad.jit(cube) if jitted[0] else cube
    for name, is_jitted in zip(names, jitted[1:], strict=True):
        f = to_number(TRANSFORMATIONS[name](f))
        f = ad.jit(f) if is_jitted else f
    return f


def assert_equal_to_plain(names: Sequence[str], jitted: Sequence[bool]) -> None:
    expected = chained(names, [False] * len(jitted))(X)
    np.testing.assert_allclose(chained(names, jitted)(X).numpy(), expected.numpy(), rtol=1e-9)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_jitted_transformation_of_a_jitted_function_computes_what_the_plain_one_does(name: str) -> None:
    found, expected = ad.jit(TRANSFORMATIONS[name](ad.jit(cube)))(X), TRANSFORMATIONS[name](cube)(X)
    for x, y in zip(ad.tree.leaves(found), ad.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    "first", [pytest.param(x, marks=pytest.mark.exhaustive if i % 2 else ()) for i, x in enumerate(TRANSFORMATIONS)]
)
def test_two_transformations_of_a_jitted_function_compute_what_the_plain_ones_do(first: str) -> None:
    for second in TRANSFORMATIONS:
        assert_equal_to_plain((first, second), (True, True, True))


@settings(max_examples=8)
@given(st.tuples(*[st.sampled_from(list(TRANSFORMATIONS))] * 3), st.tuples(*[st.booleans()] * 4))
def test_three_transformations_with_jit_anywhere_compute_what_the_plain_ones_do(
    names: tuple[str, ...], jitted: tuple[bool, ...]
) -> None:
    assert_equal_to_plain(names, jitted)


def test_attributes_of_a_function_do_not_change_the_methods_of_its_jitted_function() -> None:
    def f(x: Any) -> Any:
        return x + 1.0

    f.program = f.trace = f._staged = None  # type: ignore[attr-defined]
    assert "add" in str(ad.jit(f).program(X))
    np.testing.assert_array_equal(ad.jit(f)(X).numpy(), X.numpy() + 1)
