"""The protocol of every benchmark: warm-up, samples long enough for the clock, and the median with its interval."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TypeAlias, TypedDict

import numpy as np

from adtrain.bench.timing import statistics

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment."""

Work: TypeAlias = Callable[[int], object]
"""What is timed: it does the same so many times in a row."""

WARMUP_RUNS = 2
LONG_S = 0.5
"""What takes so long needs no runs before it to warm up."""

MIN_SAMPLE_MS = 2.0
MIN_SAMPLES, MAX_SAMPLES = 9, 31
BUDGET_MS = 60.0
"""How long the samples of one measurement should take together, where the least number of them allows it."""

MOST_REPEATS = 10**5
"""Runs in a row from which on there are no more, however little the clock sees of them."""

NOISY = 0.05
"""Width of the interval, as a part of the median, from which on a time says more about the machine's other work."""


class TimingRecord(TypedDict):
    """A `Timing` for programs."""

    median_ms: float
    low_ms: float
    high_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    repeats: int
    outliers: list[float]
    noisy: bool


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one run: samples in the order taken, each the mean over `repeats` runs in a row."""

    ms: Sequence[float]
    repeats: int = 1

    @property
    def median_ms(self) -> float:
        return self._percentile(50)

    @property
    def p20_ms(self) -> float:
        return self._percentile(20)

    @property
    def p80_ms(self) -> float:
        return self._percentile(80)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """The 95% confidence interval of the median. Raises ValueError for fewer than 6 samples."""
        return statistics.median_interval(self.ms)

    @property
    def noisy(self) -> bool:
        """Whether the interval is too wide to claim much."""
        low, high = self.interval_ms
        return high - low > NOISY * self.median_ms

    def record(self) -> TimingRecord:
        """Outliers are shown, and stay in the median. Raises ValueError for fewer than 6 samples."""
        low, high = self.interval_ms
        return {
            "median_ms": self.median_ms,
            "low_ms": low,
            "high_ms": high,
            "p20_ms": self.p20_ms,
            "p80_ms": self.p80_ms,
            "samples": len(self.ms),
            "repeats": self.repeats,
            "outliers": list(statistics.outliers(self.ms)),
            "noisy": self.noisy,
        }

    def _percentile(self, percent: float) -> float:
        return float(np.percentile(self.ms, percent))


def measure(work: Callable[[], object], finish: Callable[[], object] = int, clock: Clock = perf_counter) -> Timing:
    """`alternate` for one work alone, which is run once a call."""
    return alternate({"": prefetch_batch(work)}, finish, clock)[""]


def prefetch_batch(work: Callable[[], object]) -> Work:
    """What is run once a call, as work for `alternate`."""

    def repeated(times: int) -> None:
        for _ in range(times):
            work()

    return repeated


def alternate(
    works: Mapping[str, Work],
    finish: Callable[[], object] = int,
    clock: Clock = perf_counter,
    budget_ms: float | None = None,
    min_sample_ms: float | None = None,
    pause_s: float = 0.0,
    sampled: Callable[[str], object] = str,
) -> dict[str, Timing]:
    """Time works against one another: rounds of one sample of each, so that a machine that becomes slower does so for
    all of them. Each round begins with another work, so that none is always the first, and each sample follows
    runs that are not counted, a quarter as many: they find the caches full of the other work's data.

    A sample is of as many runs in a row as `min_sample_ms` takes. The time includes freeing what the work makes, and
    the loop around it (see `overhead_ms`), which is not subtracted. The garbage collector is off meanwhile.

    Args:
        finish: called once at the end of each sample; waits for a device that works on its own.
        budget_ms: how long the samples should take, by default BUDGET_MS for each work; there are at least MIN_SAMPLES
            of each all the same, and at most MAX_SAMPLES.
        min_sample_ms: by default MIN_SAMPLE_MS, enough for a clock that the host reads.
        pause_s: between two works; threads of the one before may go on spinning for a while.
        sampled: called with the work's name after each sample that counts.
    """
    least_ms = MIN_SAMPLE_MS if min_sample_ms is None else min_sample_ms
    names = list(works)
    with _no_garbage_collection():
        repeats, seconds = {}, {}
        for name in names:
            for _ in range(WARMUP_RUNS):
                if _sample(works[name], finish, 1, clock) >= LONG_S:
                    break
            repeats[name], seconds[name] = sample_length(works[name], finish, clock, least_ms)
        round_ms = sum(seconds.values()) * 1e3
        budget = BUDGET_MS * len(names) if budget_ms is None else budget_ms
        rounds = int(min(max(budget / round_ms, MIN_SAMPLES), MAX_SAMPLES)) if round_ms > 0 else MAX_SAMPLES
        ms: dict[str, list[float]] = {name: [] for name in names}
        for first in range(rounds):
            for i in range(len(names)):
                name = names[(first + i) % len(names)]
                if len(names) > 1:
                    sleep(pause_s)
                    if seconds[name] < LONG_S:
                        _sample(works[name], finish, -(-repeats[name] // 4), clock)
                elapsed = _sample(works[name], finish, repeats[name], clock)
                ms[name].append(elapsed * 1e3 / repeats[name])
                sampled(name)
    return {name: Timing(found, repeats[name]) for name, found in ms.items()}


def ratio(one: Timing, other: Timing) -> Timing:
    """How many times longer `one` takes than `other`, round by round; both from one `alternate`. It has no unit."""
    return Timing([a / b for a, b in zip(one.ms, other.ms, strict=True)])


def overhead_ms(clock: Clock = perf_counter) -> float:
    """What measuring adds to each run: the time of a function that does nothing."""
    return measure(lambda: None, clock=clock).median_ms


def sample_length(
    work: Work, finish: Callable[[], object], clock: Clock, least_ms: float, most: int = MOST_REPEATS
) -> tuple[int, float]:
    """How many runs a sample of so many milliseconds takes, and its seconds."""
    repeats = 1
    while (elapsed := _sample(work, finish, repeats, clock)) * 1e3 < least_ms and repeats < most:
        short = least_ms / (elapsed * 1e3) if elapsed > 0 else math.inf
        repeats = min(repeats * math.ceil(min(max(1.1 * short, 2), 10)), most)
    return repeats, elapsed


def _sample(work: Work, finish: Callable[[], object], repeats: int, clock: Clock) -> float:
    start = clock()
    work(repeats)
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
