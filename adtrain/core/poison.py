"""Poisoned memory: new memory holds NaN (integers: -1), so that results show what a kernel has not written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

BYTE = 0xFF
"""The value of each byte. Floats of such bytes are NaN."""

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
