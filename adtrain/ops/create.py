"""New arrays: constants and ranges."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.array import Array, Value, array
from adtrain.core.errors import OptionError, OutOfMemory, ShapeError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape, checked_number, dtype_of
from adtrain.ops.common import ArrayLike, as_value, integers

__all__ = ["arange", "full", "ones", "ones_like", "zeros", "zeros_like"]

MOST_NUMBERS = 2**60
"""An address has 63 bits, a number 8 bytes."""


def _full_shape(shape: Shape, value: float, dtype: np.dtype, device: str) -> ArrayType:
    if any(length < 0 for length in shape):
        raise ShapeError(f"full: found a negative length in shape {shape}")
    return ArrayType(shape, dtype)


full_p: Primitive = Primitive(
    "full",
    _full_shape,
    lambda shape, value, dtype, device: np.broadcast_to(np.asarray(value, dtype), shape),
    flops=no_flops,
    view=True,
    traits=(Trait.BROADCAST,),
    axes="->*",
)


def full(shape: int | Shape, value: float, dtype: Any = np.float32, device: str = "cpu") -> Value:
    """An array of ``shape`` with ``value`` everywhere.

    Raises:
        ShapeError: a length is negative. DTypeError: ``dtype`` cannot hold ``value``.
    """
    lengths, elements = integers("full", "shape", shape), dtype_of("full", dtype)
    return bind(full_p, shape=lengths, value=checked_number("full", value, elements), dtype=elements, device=device)


def zeros(shape: int | Shape, dtype: Any = np.float32, device: str = "cpu") -> Value:
    """An array of zeros."""
    return full(shape, 0, dtype, device)


def ones(shape: int | Shape, dtype: Any = np.float32, device: str = "cpu") -> Value:
    """An array of ones."""
    return full(shape, 1, dtype, device)


def zeros_like(x: ArrayLike) -> Value:
    """Zeros of the shape, dtype and device of ``x``."""
    like = as_value(x)
    return full(like.shape, 0, like.dtype, like.device)


def ones_like(x: ArrayLike) -> Value:
    """Ones of the shape, dtype and device of ``x``."""
    like = as_value(x)
    return full(like.shape, 1, like.dtype, like.device)


@checked_options
def arange(start: float, stop: float | None = None, step: float = 1, dtype: Any = None, device: str = "cpu") -> Array:
    """Evenly spaced numbers, as `numpy.arange`; integers become int64, floats float32.

    Raises:
        OptionError: they are too many, or their number is not finite. OutOfMemory: there is no memory for them.
    """
    first, end = (start, stop) if stop is not None else (0, start)
    if not abs(end - first) < MOST_NUMBERS * abs(step):
        raise OptionError(f"arange: found start {first}, stop {end}, step {step}, expected fewer than 2^60 numbers")
    try:
        numbers = np.arange(first, end, step)
    except MemoryError as error:
        raise OutOfMemory(f"arange: {error}") from None
    if dtype is None:
        dtype = np.float32 if numbers.dtype.kind == "f" else np.int64
    return array(numbers, dtype, device)
