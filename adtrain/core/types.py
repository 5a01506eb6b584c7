"""ArrayType: shape and dtype of an array. DTYPES: the dtypes that adtrain computes with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain.core.errors import DTypeError

Shape: TypeAlias = tuple[int, ...]
DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64", "uint8", "uint32", "bool")))


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
