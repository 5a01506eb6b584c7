"""Poisoned memory: new memory holds NaN (integers: -1), so that results show what a kernel has not written.

On the CPU each value of a compiled Program also lies between two guard zones, which show what a kernel has written
outside its output. On a GPU this holds for the outputs of a Program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adtrain.core.errors import AdtrainError

BYTE = 0xFF
"""The value of each byte. Floats of such bytes are NaN."""

GUARD = 4096
"""Bytes of the zone before a value, and of that after it."""


class OutOfBounds(AdtrainError):
    """A kernel wrote into a guard zone. `primitive` is the name of its operation."""

    def __init__(self, primitive: str) -> None:
        super().__init__(f"{primitive}: a kernel wrote outside its output")
        self.primitive = primitive


_active = False


def active() -> bool:
    """Whether backends fill new memory with BYTE."""
    return _active


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is allocated inside with BYTE; all threads."""
    global _active
    before, _active = _active, True
    try:
        yield
    finally:
        _active = before
