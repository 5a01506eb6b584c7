"""Arrays that begin at a cache line, so that a vector register is loaded from one line and not from two.

NumPy aligns large arrays to 16 bytes. Where data come from the second-level cache or memory, compiled loops over such
arrays take up to 1.5 times as long.
"""

from __future__ import annotations

import math

import numpy as np

CACHE_LINE = 64
"""Bytes."""
MIN_BYTES = 1 << 14
"""Smaller arrays are left as NumPy allocates them: aligning takes a microsecond."""


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array, not initialised. A large one is a view of an array of bytes that nothing else refers to."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -address(memory) % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def copy(x: np.ndarray) -> np.ndarray:
    """A C-contiguous copy."""
    found = empty(x.shape, x.dtype)
    np.copyto(found, x)
    return found


def is_aligned(x: np.ndarray) -> bool:
    """Whether the array begins at a cache line, or is too small for that to matter."""
    return x.nbytes < MIN_BYTES or address(x) % CACHE_LINE == 0


def address(x: np.ndarray) -> int:
    """Where the array begins in memory."""
    found: int = x.__array_interface__["data"][0]
    return found
