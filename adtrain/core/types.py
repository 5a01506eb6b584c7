"""ArrayType: shape and dtype of an array. DTYPES: the dtypes that adtrain computes with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain.core.errors import DTypeError

Shape: TypeAlias = tuple[int, ...]
DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64", "uint8", "uint32", "bool")))

BITS = np.dtype(np.uint16)
"""The type of an array of bfloat16. NumPy has none, so its elements are the bits. Only passes make such arrays."""
NHWC, NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
"""The axes of a transpose from NCHW to NHWC (channels last), and of the transpose back."""


def permuted(shape: Sequence[int], axes: Sequence[int]) -> Shape:
    """The shape of a transpose."""
    return tuple(shape[axis] for axis in axes)


def dtype_of(name: str, dtype: Any) -> np.dtype:
    """``dtype`` as a NumPy dtype.

    Args:
        name: the operation, for the error's text.

    Raises:
        DTypeError: it is not one of DTYPES.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in DTYPES:
        known = ", ".join(sorted(map(str, DTYPES)))
        raise DTypeError(f"{name}: found elements of type {dtype if found is None else found}, expected one of {known}")
    return found


def checked_number(name: str, value: Any, dtype: np.dtype) -> Any:
    """``value`` as a Python number for elements of ``dtype``: int for integers, bool for bool.

    Eager and compiled code take their constants from here, so both store the same number.

    Raises:
        DTypeError: ``dtype`` cannot hold it: a fraction, NaN or infinity for integers, or a number out of range.
    """
    if dtype.kind == "f":
        try:
            if not np.isfinite(float(value)) or np.isfinite(_rounded(value, dtype)):
                return value
        except (OverflowError, TypeError, ValueError):
            pass
        expected = f"a number of at most {np.finfo(dtype).max:.5g}"
    else:
        low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        try:
            if low <= value <= high and value == int(value):  # false for NaN
                return bool(value) if dtype.kind == "b" else int(value)
        except (TypeError, ValueError):  # of what is no number
            pass
        expected = f"a whole number from {low} to {high}"
    raise DTypeError(f"{name}: found {value} for elements of type {dtype}, expected {expected}")


def _rounded(value: Any, dtype: np.dtype) -> Any:
    with np.errstate(over="ignore"):
        return dtype.type(value)


class ArrayType(NamedTuple):
    """Shape and dtype of an array. Shape rules compute the types of outputs from the types of arguments."""

    shape: Shape
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"
