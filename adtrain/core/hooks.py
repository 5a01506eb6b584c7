"""Hooks: observers of every operation and every Program that runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from adtrain.core.array import Array
from adtrain.core.primitive import Primitive
from adtrain.core.program import Program
from adtrain.core.types import ArrayType


@dataclass(frozen=True)
class Call:
    """One run of a primitive, with its scope and phase."""

    primitive: Primitive
    args: Sequence[Array]
    params: Mapping[str, Any]
    outputs: Sequence[ArrayType]
    device: str
    scope: str
    phase: str


class Hook:
    """Base of observers. Nothing but the backend's work happens between `before` and `after`."""

    def before(self, call: Call) -> None:
        """Called after the shape rule, before the backend runs."""

    def after(self, call: Call) -> None:
        """Called when the backend has returned. A GPU may still be running."""

    def program(self, program: Program, seconds: Sequence[float]) -> None:
        """Called when a jitted function's Program has run, with the seconds of each equation."""


class _Active(threading.local):
    hooks: tuple[Hook, ...] = ()


_active = _Active()


def active_hooks() -> tuple[Hook, ...]:
    """The observers of this thread, the outermost block's first."""
    return _active.hooks


@contextmanager
def hook(observer: Hook) -> Iterator[None]:
    """Call ``observer`` for everything that this thread runs in a block."""
    outer = _active.hooks
    _active.hooks = (*outer, observer)
    try:
        yield
    finally:
        _active.hooks = outer
