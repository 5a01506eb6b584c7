"""Status messages for a progress display: "compiling 7 of 12 kernels"; "" when training steps begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

StatusHandler: TypeAlias = Callable[[str], None]

_handlers: list[StatusHandler] = []


@contextmanager
def status_handler(handler: StatusHandler) -> Iterator[None]:
    """Within the block, pass each message of `report_status` to `handler`, on the thread that reports it."""
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)


def report_status(message: str) -> None:
    """Pass a message about the activity that begins to all handlers."""
    for handler in _handlers:
        handler(message)
