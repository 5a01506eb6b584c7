"""Comparisons, selection, and the functions made of them."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain.core.array import NUMBERS, Value
from adtrain.core.errors import DTypeError, OptionError
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, checked_number
from adtrain.ops.common import (
    ArrayLike,
    Binary,
    Unary,
    as_value,
    astype_p,
    binary,
    broadcast,
    broadcast_shapes,
    broadcast_to,
    elementwise,
    elementwise_type,
    floating,
    promote,
    unary,
)

__all__ = [
    "clip", "equal", "greater", "greater_equal", "isfinite", "isinf", "isnan", "less", "less_equal", "maximum",
    "minimum", "not_equal", "where",
]  # fmt: skip


def _predicate(name: str, cpu: Callable[..., np.ndarray], expression: str) -> Primitive:
    return elementwise(name, cpu, expression, floating=False, instead_of_bool=None, result=bool)


equal_p: Primitive = _predicate("equal", np.equal, "a == b")
not_equal_p: Primitive = _predicate("not_equal", np.not_equal, "a != b")
less_p: Primitive = _predicate("less", np.less, "a < b")
less_equal_p: Primitive = _predicate("less_equal", np.less_equal, "a <= b")
isnan_p: Primitive = _predicate("isnan", np.isnan, "a != a")
isfinite_p: Primitive = _predicate("isfinite", np.isfinite, "a - a == 0")
isinf_p: Primitive = _predicate("isinf", np.isinf, "a == a && a - a != 0")


def _comparable(name: str, a: ArrayLike, b: ArrayLike) -> list[Value]:
    """`broadcast`, with integer arrays as int64 where their type cannot hold the number that they are compared with."""
    pair = [x if isinstance(x, NUMBERS) else as_value(x) for x in (a, b)]
    number = next((x for x in pair if type(x) is int), 0)
    for i, x in enumerate(pair):
        if isinstance(x, Value) and x.dtype.kind in "iu":
            limits = np.iinfo(x.dtype)
            if not limits.min <= number <= limits.max:
                pair[i] = bind(astype_p, x, dtype=np.dtype(np.int64))
    return broadcast(name, *pair)


equal: Binary = binary(equal_p, "a == b as bool.", _comparable)
not_equal: Binary = binary(not_equal_p, "a != b as bool.", _comparable)
less: Binary = binary(less_p, "a < b as bool.", _comparable)
less_equal: Binary = binary(less_equal_p, "a <= b as bool.", _comparable)


def greater(a: ArrayLike, b: ArrayLike) -> Value:
    """a > b as bool."""
    return less(b, a)


def greater_equal(a: ArrayLike, b: ArrayLike) -> Value:
    """a >= b as bool."""
    return less_equal(b, a)


isnan: Unary = unary(isnan_p, "Whether x is NaN, as bool")
isfinite: Unary = unary(isfinite_p, "Whether x is neither NaN nor infinite, as bool")
isinf: Unary = unary(isinf_p, "Whether x is infinity or -infinity, as bool")


def _where_shape(condition: Any, a: Any, b: Any) -> ArrayType:
    if condition.dtype != np.bool_:
        raise DTypeError(f"where: the condition is {condition.dtype}, expected bool")
    return elementwise_type("where", ArrayType(condition.shape, a.dtype), a, b)


where_p: Primitive = Primitive(
    "where",
    _where_shape,
    np.where,
    [
        None,
        lambda out, condition, a, b: lambda ct: where(condition, ct, 0.0),
        lambda out, condition, a, b: lambda ct: where(condition, 0.0, ct),
    ],
    expression="a ? b : c",
    traits=(Trait.LINEAR,),
)


def where(condition: ArrayLike, a: ArrayLike, b: ArrayLike) -> Value:
    """``a`` where the condition holds, else ``b``; the three are broadcast together."""
    chosen = as_value(condition)
    first, second = (
        value if isinstance(x, Value) else value.to(chosen.device)
        for x, value in zip((a, b), promote(a, b), strict=True)
    )
    shape = broadcast_shapes("where", chosen.shape, first.shape, second.shape)
    branches = (
        value if isinstance(x, NUMBERS) else broadcast_to(value, shape) for x, value in ((a, first), (b, second))
    )
    return bind(where_p, broadcast_to(chosen, shape), *branches)


def _larger(out: Value, winner: Value, loser: Value) -> Any:
    """The larger argument gets the cotangent; equal ones get half of it each."""
    share = where(less(loser, winner), 1.0, where(equal(winner, loser), 0.5, 0.0)).astype(out.dtype)
    return lambda ct: ct * share


def _clip_expression(min: float | None, max: float | None) -> str:
    if any(bound != bound for bound in (min, max)):
        return "(T)NAN"
    # if min > max, the result is max, as in NumPy
    low = "{max}" if min is not None and max is not None and min > max else "{min}"
    above = "" if max is None else "a > (T){max} ? (T){max} : "
    return above + ("a" if min is None else f"a < (T){low} ? (T){low} : a")


# a != a: the result is NaN if an argument is
maximum_p: Primitive = elementwise(
    "maximum",
    np.maximum,
    "a >= b || a != a ? a : b",
    _larger,
    lambda out, a, b: _larger(out, b, a),
    floating=False,
    instead_of_bool=None,
)
minimum_p: Primitive = elementwise(
    "minimum",
    np.minimum,
    "a <= b || a != a ? a : b",
    lambda out, a, b: _larger(out, -a, -b),
    lambda out, a, b: _larger(out, -b, -a),
    floating=False,
    instead_of_bool=None,
)
clip_p: Primitive = elementwise(
    "clip",
    lambda x, min, max: np.clip(x, min, max),
    _clip_expression,
    # inside the bounds, and on them, the output is the input
    lambda out, x, min, max: (lambda inside: lambda ct: where(inside, ct, 0.0))(equal(out, x)),
    floating=False,
)


maximum: Binary = binary(
    maximum_p, 'The larger of two; where they are equal each gets half the cotangent. For bool it is "or".'
)
minimum: Binary = binary(
    minimum_p, 'The smaller of two; where they are equal each gets half the cotangent. For bool it is "and".'
)


def clip(x: ArrayLike, min: float | None = None, max: float | None = None) -> Value:
    """x limited to [min, max], Python numbers; the derivative is 1 inside and on the bounds, 0 outside.

    If a bound is NaN, all elements are NaN, as in NumPy and PyTorch. A bound may be out of range for an integer type.

    Raises:
        DTypeError: a bound is an array (use `maximum` and `minimum`), or [min, max] has no number of the integer type.
    """
    bounds = [bound for bound in (min, max) if bound is not None]
    if not bounds:
        raise OptionError("clip: found neither min nor max, expected at least one")
    if not all(isinstance(bound, (int, float, np.integer, np.floating)) for bound in bounds):
        raise DTypeError("clip: a bound is an array, expected Python numbers; use maximum and minimum")
    value = as_value(x)
    number = int if value.dtype.kind in "iu" and all(isinstance(b, (int, np.integer)) for b in bounds) else float
    value = floating(value) if number is float else value
    low, high = (None if bound is None else number(bound) for bound in (min, max))
    if number is int:
        low, high = _within_type(value.dtype, low, high)
    return bind(clip_p, value, min=low, max=high)


def _within_type(dtype: np.dtype, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """The bounds of a clip. One that excludes no number of the integer type becomes the limit of the type."""
    smallest, largest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    low = low if low is None else builtins.max(low, smallest)
    high = high if high is None else builtins.min(high, largest)
    for bound in (low, high):
        if bound is not None:
            checked_number("clip", bound, dtype)
    return low, high
