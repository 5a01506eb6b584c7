"""Scope (layer) and phase (part of the step) of the code that runs. Programs and timings show both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Where(threading.local):
    scope = ""
    phase = "forward"


_where = _Where()


def current_scope() -> str:
    """The names of the enclosing scopes, outermost first, joined by dots."""
    return _where.scope


def current_phase() -> str:
    """``forward``, ``backward`` or ``update``."""
    return _where.phase


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Set the layer of the operations in a block: ``with scope("0.linear")``. Scopes nest."""
    outer = _where.scope
    _where.scope = f"{outer}.{name}" if outer else name
    try:
        yield
    finally:
        _where.scope = outer


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Set the phase of the operations in a block."""
    outer = _where.phase
    _where.phase = name
    try:
        yield
    finally:
        _where.phase = outer


@contextmanager
def at(scope: str, phase: str) -> Iterator[None]:
    """Set both for a block, to the scope and phase of a recorded operation."""
    outer = _where.scope, _where.phase
    _where.scope, _where.phase = scope, phase
    try:
        yield
    finally:
        _where.scope, _where.phase = outer
