"""The protocol of every benchmark: warm-up, samples long enough for the clock, the median with its 20th and 80th
percentile."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import numpy as np

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment."""

WARMUP_RUNS = 2
MIN_SAMPLE_MS = 2.0
MIN_SAMPLES, MAX_SAMPLES = 5, 25
BUDGET_MS = 60.0
"""How long the samples of one measurement should take together, where the least number of them allows it."""

NOISY_SPREAD = 1.3
"""p80 / p20 from which a measurement says more about the machine's other work than about ours."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one run: percentiles over `samples`, each of which is the mean over `repeats` runs in a row."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    repeats: int

    @property
    def noisy(self) -> bool:
        return self.p80_ms > NOISY_SPREAD * self.p20_ms


def summarize(seconds: Sequence[float], repeats: int = 1) -> Timing:
    """The timing of samples, each the time of `repeats` runs."""
    p20, median, p80 = (np.percentile(seconds, [20, 50, 80]) * (1e3 / repeats)).tolist()
    return Timing(median, p20, p80, len(seconds), repeats)


def measure(work: Callable[[], object], finish: Callable[[], object] = int, clock: Clock = perf_counter) -> Timing:
    """Time `work`, which is run as often in a row as a sample of MIN_SAMPLE_MS takes.

    The time includes freeing what `work` returns, and the loop around it (see `overhead_ms`), which is not subtracted.
    The garbage collector is off meanwhile.

    Args:
        finish: called once at the end of each sample; waits for a device that works on its own.
    """
    with _no_garbage_collection():
        for _ in range(WARMUP_RUNS):
            work()
        repeats = 1
        while (elapsed := _sample(work, finish, repeats, clock)) * 1e3 < MIN_SAMPLE_MS:
            short = MIN_SAMPLE_MS / (elapsed * 1e3) if elapsed > 0 else math.inf
            repeats *= math.ceil(min(max(1.1 * short, 2), 10))
        count = int(min(max(BUDGET_MS / (elapsed * 1e3), MIN_SAMPLES), MAX_SAMPLES))
        return summarize([_sample(work, finish, repeats, clock) for _ in range(count)], repeats)


def overhead_ms(clock: Clock = perf_counter) -> float:
    """What measuring adds to each run: the time of a function that does nothing."""
    return measure(lambda: None, clock=clock).median_ms


def _sample(work: Callable[[], object], finish: Callable[[], object], repeats: int, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        work()
    finish()
    return clock() - start


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
