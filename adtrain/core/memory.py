"""Memory of new arrays: where it begins, and, for tests, what it holds; and when Python looks for garbage.

Arrays on the host begin at a cache line, so that a vector load reads one line, not two. NumPy aligns large arrays to 16
bytes. Compiled loops over such arrays take up to 1.5 times as long if the data come from the second-level cache or
memory.

Poisoned memory holds NaN (integers: -1), so that results show what a kernel has not written. On the CPU each value of a
compiled Program also lies between two guard zones, which show what a kernel has written outside its output. On a GPU
this holds for the outputs of a Program.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from adtrain.core.errors import AdtrainError

CACHE_LINE = 64
"""Bytes."""
MIN_BYTES = 1 << 14
"""Smaller arrays are not aligned, because that takes a microsecond."""


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new C-contiguous array, not initialised. A large one begins at a cache line."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -address(memory) % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def copy_aligned(x: np.ndarray) -> np.ndarray:
    """A C-contiguous copy."""
    result = empty_aligned(x.shape, x.dtype)
    np.copyto(result, x)
    return result


def is_aligned(x: np.ndarray) -> bool:
    """Whether the array begins at a cache line, or is too small for that to matter."""
    return x.nbytes < MIN_BYTES or address(x) % CACHE_LINE == 0


def address(x: np.ndarray) -> int:
    """The address of the first element."""
    result: int = x.__array_interface__["data"][0]
    return result


POISON = 0xFF
"""The value of each byte of poisoned memory. Floats of such bytes are NaN."""

GUARD = 4096
"""Bytes of the zone before a value, and of that after it."""


class OutOfBounds(AdtrainError):
    """A kernel wrote into a guard zone. `primitive` is the name of its operation."""

    def __init__(self, primitive: str) -> None:
        super().__init__(f"{primitive}: a kernel wrote outside its output")
        self.primitive = primitive


_poisoned = False


def is_poisoned() -> bool:
    """Whether backends fill new memory with POISON."""
    return _poisoned


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is allocated inside with POISON; all threads."""
    global _poisoned
    before, _poisoned = _poisoned, True
    try:
        yield
    finally:
        _poisoned = before


@contextmanager
def without_collection() -> Iterator[None]:
    """Let Python look for no unused reference cycles in a block."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
