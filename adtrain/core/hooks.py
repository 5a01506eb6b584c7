"""Hooks: observers at the one door through which every operation that really runs must go."""

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
    """One run of a primitive: on what, with which static parameters, to what, and for which part of the network."""

    primitive: Primitive
    args: Sequence[Array]
    params: Mapping[str, Any]
    outputs: Sequence[ArrayType]
    device: str
    scope: str
    phase: str


class Hook:
    """Base of observers; `before` and `after` surround the backend's work and nothing else."""

    def before(self, call: Call) -> None:
        """Called when the shapes are known to fit and the backend is about to run."""

    def after(self, call: Call) -> None:
        """Called when the backend has returned; on a GPU the work may still be under way."""

    def program(self, program: Program, seconds: Sequence[float]) -> None:
        """Called when a staged function's Program has run, with the time of each of its equations."""


class _Active(threading.local):
    hooks: tuple[Hook, ...] = ()


_active = _Active()


def active_hooks() -> tuple[Hook, ...]:
    return _active.hooks


@contextmanager
def hook(observer: Hook) -> Iterator[None]:
    """Let ``observer`` see every primitive that runs in a block (in this thread)."""
    outer = _active.hooks
    _active.hooks = (*outer, observer)
    try:
        yield
    finally:
        _active.hooks = outer
