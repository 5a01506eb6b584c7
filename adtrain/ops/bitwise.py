"""And, or, exclusive or, and not: of the bits of integers, and of bool. They have no derivative."""

from __future__ import annotations

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import DTypeError
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.ops.broadcasting import broadcast
from adtrain.ops.common import ArrayLike, as_value, elementwise


def _bitwise(name: str, symbol: str) -> Primitive:
    reference = getattr(np, name)
    return elementwise(name, reference, f"a {symbol} b", None, None, floating=False, instead_of_bool=None)


bitwise_and_p: Primitive = _bitwise("bitwise_and", "&")
bitwise_or_p: Primitive = _bitwise("bitwise_or", "|")
bitwise_xor_p: Primitive = _bitwise("bitwise_xor", "^")


def _apply(primitive: Primitive, a: ArrayLike, b: ArrayLike) -> Value:
    first, second = broadcast(primitive.name, a, b)
    if first.dtype.kind == "f":
        raise DTypeError(f"{primitive.name}: found {first.dtype}, expected integers or bool; compare or use astype")
    return bind(primitive, first, second)


def bitwise_and(a: ArrayLike, b: ArrayLike) -> Value:
    """a & b. Raises DTypeError for floating-point numbers."""
    return _apply(bitwise_and_p, a, b)


def bitwise_or(a: ArrayLike, b: ArrayLike) -> Value:
    """a | b. Raises DTypeError for floating-point numbers."""
    return _apply(bitwise_or_p, a, b)


def bitwise_xor(a: ArrayLike, b: ArrayLike) -> Value:
    """a ^ b. Raises DTypeError for floating-point numbers."""
    return _apply(bitwise_xor_p, a, b)


def bitwise_not(x: ArrayLike) -> Value:
    """~x: of bool not x, of integers all bits turned. Raises DTypeError for floating-point numbers."""
    value = as_value(x)
    if value.dtype.kind == "f":
        raise DTypeError(f"bitwise_not: found {value.dtype}, expected integers or bool; compare or use astype")
    ones = True if value.dtype == np.bool_ else -1 if value.dtype.kind == "i" else int(np.iinfo(value.dtype).max)
    return bitwise_xor(value, ones)
