"""Ctrl-C during a training: the first one stops it after the current steps, the second one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the first SIGINT during a `with` block be only recorded; the function returned says whether it has come.

    Does nothing in threads other than the main one, and where the program has a handler of its own.
    """
    arrived: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(arrived)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
