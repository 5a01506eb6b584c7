"""ArrayType: the shape and dtype of an array, and the dtypes that adtrain computes with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain.core.errors import DTypeError

Shape: TypeAlias = tuple[int, ...]
DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64", "uint8", "uint32", "bool")))


def dtype_of(name: str, dtype: Any) -> np.dtype:
    """``dtype`` as a NumPy dtype.

    Raises:
        DTypeError: adtrain does not compute with it.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in DTYPES:
        known = ", ".join(sorted(map(str, DTYPES)))
        raise DTypeError(f"{name}: found elements of type {dtype if found is None else found}, expected one of {known}")
    return found


class ArrayType(NamedTuple):
    """What is known of an array before it exists; shape rules map these to one another."""

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
