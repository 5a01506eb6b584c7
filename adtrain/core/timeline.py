"""The time of this process, divided into consecutive spans, each of one activity, and messages about activities.

The times of the spans add up to the whole. Messages are for a progress display: "compiling 7 of 12 kernels"; "" when
training steps begin.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
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


OTHER = "other"

SHORT_SECONDS = 1e-3
"""A shorter activity is counted as part of the span before it."""

Span: TypeAlias = tuple[str, float, float]
"""An activity, when it started, in seconds since the timeline began, and how many seconds it took."""


class Timeline:
    """The activities of one thread. At any time there is one: `during` interrupts the current one for its block.

    Attributes:
        began: when it began, by `time.perf_counter`.
    """

    def __init__(self, began: float, activity: str = OTHER) -> None:
        self.began, self.activity = began, activity
        self.changed = began
        self.ended: list[Span] = []
        self.thread = threading.get_ident()

    def change(self, activity: str) -> str:
        """Begin another activity. Returns the one that ends."""
        now, before = perf_counter(), self.activity
        if activity == before:
            return before
        if self.ended and now - self.changed < SHORT_SECONDS:
            name, start, _ = self.ended.pop()
            self.ended.append((name, start, now - self.began - start))
        else:
            self.ended.append((before, self.changed - self.began, now - self.changed))
        self.changed, self.activity = now, activity
        if self.ended[-1][0] == activity:
            self.changed = self.began + self.ended.pop()[1]
        return before

    def spans(self) -> list[Span]:
        """All spans, with the current one so far; their times add up to the time since `began`."""
        return [*self.ended, (self.activity, self.changed - self.began, perf_counter() - self.changed)]


@contextmanager
def during(activity: str) -> Iterator[None]:
    """Count the time of the block as that of an activity. Only the timeline's own thread is counted."""
    timeline = _current
    if threading.get_ident() != timeline.thread:
        yield
        return
    before = timeline.change(activity)
    try:
        yield
    finally:
        timeline.change(before)


def current() -> Timeline:
    """The timeline of the process, or that of the run that called `restart`."""
    return _current


def restart() -> Timeline:
    """Begin a new timeline, that of a run which is not the whole process."""
    global _current
    _current = Timeline(perf_counter())
    return _current


def _process_age() -> float:
    """Seconds since the process started, by Linux's clock of processes; 0 on other systems."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


_current = Timeline(perf_counter() - _process_age(), "startup")
_current.change("imports")
