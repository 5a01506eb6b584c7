"""Arrays that begin at a cache line, so that a vector load reads one line, not two.

NumPy aligns large arrays to 16 bytes. Compiled loops over such arrays take up to 1.5 times as long if the data come
from the second-level cache or memory.
"""

from __future__ import annotations

import math

import numpy as np

CACHE_LINE = 64
"""Bytes."""
MIN_BYTES = 1 << 14
"""Smaller arrays are not aligned, because that takes a microsecond."""


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new C-contiguous array, not initialised. A large one begins at a cache line."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -address(memory) % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def copy(x: np.ndarray) -> np.ndarray:
    """A C-contiguous copy."""
    result = empty(x.shape, x.dtype)
    np.copyto(result, x)
    return result


def is_aligned(x: np.ndarray) -> bool:
    """Whether the array begins at a cache line, or is too small for that to matter."""
    return x.nbytes < MIN_BYTES or address(x) % CACHE_LINE == 0


def address(x: np.ndarray) -> int:
    """The address of the first element."""
    result: int = x.__array_interface__["data"][0]
    return result
