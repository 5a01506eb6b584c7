"""What the process is busy with before the first step, for a progress display: "compiling 7 of 12 kernels"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Show: TypeAlias = Callable[[str], None]

_shown_by: list[Show] = []


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Within it, `show` gets what `tell` is told."""
    _shown_by.append(show)
    try:
        yield
    finally:
        _shown_by.remove(show)


def tell(what: str) -> None:
    """Show what begins now."""
    for show in _shown_by:
        show(what)
