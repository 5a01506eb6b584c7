"""Where in the network (scope) and in the step (phase) the running code is; per-op timing and Programs name both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Where(threading.local):
    scope = ""
    phase = "forward"


_where = _Where()


def current_scope() -> str:
    """Names of the enclosing scopes, outermost first, joined by dots."""
    return _where.scope


def current_phase() -> str:
    """``forward``, ``backward`` or ``update``."""
    return _where.phase


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name the operations of a block after a layer: ``with scope("0.linear")``. Scopes nest."""
    outer = _where.scope
    _where.scope = f"{outer}.{name}" if outer else name
    try:
        yield
    finally:
        _where.scope = outer


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say which part of the step a block belongs to."""
    outer = _where.phase
    _where.phase = name
    try:
        yield
    finally:
        _where.phase = outer


@contextmanager
def at(scope: str, phase: str) -> Iterator[None]:
    """Be in a scope and phase that were recorded."""
    outer = _where.scope, _where.phase
    _where.scope, _where.phase = scope, phase
    try:
        yield
    finally:
        _where.scope, _where.phase = outer
