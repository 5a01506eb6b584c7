"""Where the time of a run goes: named spans between the start of the process and the end of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from adtrain.config.values import Duration


@dataclass(frozen=True)
class Span:
    """A part of a run. `start` is in seconds since the start of the process."""

    name: str
    start: Duration
    seconds: Duration


@contextmanager
def timed(name: str, spans: list[Span]) -> Iterator[None]:
    """Append the span of the block to `spans`."""
    start = perf_counter()
    yield
    spans.append(Span(name, max(0.0, start - _PROCESS_START), perf_counter() - start))


def start_up() -> Span:
    """The span from the start of the process until here."""
    return Span("start-up", 0.0, max(0.0, perf_counter() - _PROCESS_START))


def _process_age() -> float:
    """Seconds since the process started, where Linux tells it, otherwise 0."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


_PROCESS_START = perf_counter() - _process_age()
