"""How times are taken: warm-up, samples long enough for the clock, and interleaved samples of what is compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import comb
from time import perf_counter, sleep
from typing import TypeAlias, TypeVar

from adtrain.config.records import Milliseconds
from adtrain.core.errors import AdtrainError
from adtrain.core.memory import without_collection
from adtrain.metrics import percentiles

K = TypeVar("K")
T = TypeVar("T")

Clock: TypeAlias = Callable[[], float]
"""Returns seconds since a fixed moment."""

Workload: TypeAlias = Callable[[int], object]
"""What is timed: called with n, it runs n times in succession."""

WARMUP_RUNS = 2
LONG_S = 0.5
"""A run this long needs no warm-up."""

MIN_SAMPLE_MS = 2.0
MIN_SAMPLES, MAX_SAMPLES = 9, 31
BUDGET_MS = 60.0
"""Target for all samples of one workload together; MIN_SAMPLES may take longer."""

MAX_REPEATS = 10**5
"""Limit of the runs in one sample, for work that the clock does not see."""

NOISY = 0.05
"""A time whose interval is wider than this share of its median is marked as noisy."""


@dataclass(frozen=True)
class Time:
    """A `Timing` in a result.

    Attributes:
        low_ms, high_ms: the 95% confidence interval of the median.
        outliers: samples that are far from the others; they count in the median.
        noisy: whether the interval is wider than NOISY of the median.
    """

    median_ms: Milliseconds
    low_ms: Milliseconds
    high_ms: Milliseconds
    p20_ms: Milliseconds
    p80_ms: Milliseconds
    samples: int
    repeats: int
    outliers: list[float]
    noisy: bool


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one run: samples in the order in which they were taken, each the mean over `repeats` runs."""

    ms: Sequence[float]
    repeats: int = 1

    @property
    def median_ms(self) -> float:
        return percentiles(self.ms, [50])[0]

    def record(self) -> Time:
        """The time in a result. Raises ValueError for fewer than 6 samples."""
        low, high = median_interval(self.ms)
        p20, median, p80 = percentiles(self.ms, [20, 50, 80])
        noisy = high - low > NOISY * median
        return Time(median, low, high, p20, p80, len(self.ms), self.repeats, list(outliers(self.ms)), noisy)


def measure(work: Callable[[], object], finish: Callable[[], object] = int, clock: Clock = perf_counter) -> Timing:
    """The time of a function; see `alternate`."""
    return alternate({"": repeatedly(work)}, finish, clock)[""]


def repeatedly(once: Callable[[], object], finish: Callable[[], object] = int) -> Workload:
    """The workload that calls `once` n times and then `finish`."""

    def workload(times: int) -> None:
        for _ in range(times):
            once()
        finish()

    return workload


def alternate(
    workloads: Mapping[str, Workload],
    finish: Callable[[], object] = int,
    clock: Clock = perf_counter,
    budget_ms: float | None = None,
    min_sample_ms: float | None = None,
    pause_s: float = 0.0,
    sampled: Callable[[str], object] = str,
) -> dict[str, Timing]:
    """Time workloads in interleaved samples, so that a machine that slows down does so for all of them.

    Each round takes one sample of each workload and begins with another one. Each sample follows a warm-up of a quarter
    as many runs, because the caches hold the other workloads' data. A sample has as many runs as `min_sample_ms` needs.
    Its time includes freeing what the workload allocates, and the loop around it (`Protocol.overhead_ms`). The garbage
    collector is off.

    Args:
        finish: called at the end of each sample; waits for a device that works asynchronously.
        budget_ms: target for all samples together, by default BUDGET_MS for each workload. There are MIN_SAMPLES to
            MAX_SAMPLES of each.
        min_sample_ms: by default MIN_SAMPLE_MS, long enough for a clock that the host reads.
        pause_s: pause between workloads, for threads that still spin.
        sampled: called with the workload's name after each sample, warm-up excluded.
    """
    least_ms = MIN_SAMPLE_MS if min_sample_ms is None else min_sample_ms
    names = list(workloads)
    with without_collection():
        repeats, seconds = {}, {}
        for name in names:
            for _ in range(WARMUP_RUNS):
                if sample_seconds(workloads[name], finish, 1, clock) >= LONG_S:
                    break
            repeats[name], seconds[name] = sample_length(workloads[name], finish, clock, least_ms)
        round_ms = sum(seconds.values()) * 1e3
        budget = BUDGET_MS * len(names) if budget_ms is None else budget_ms
        rounds = int(min(max(budget / round_ms, MIN_SAMPLES), MAX_SAMPLES)) if round_ms > 0 else MAX_SAMPLES

        def sample(name: str) -> float:
            if len(names) > 1:
                sleep(pause_s)
                if seconds[name] < LONG_S:
                    sample_seconds(workloads[name], finish, -(-repeats[name] // 4), clock)
            elapsed = sample_seconds(workloads[name], finish, repeats[name], clock)
            sampled(name)
            return elapsed * 1e3 / repeats[name]

        ms = in_turns({name: partial(sample, name) for name in names}, rounds)
    return {name: Timing(found, repeats[name]) for name, found in ms.items()}


def in_turns(samples: Mapping[K, Callable[[], T]], rounds: int, failed: dict[K, str] | None = None) -> dict[K, list[T]]:
    """Take interleaved samples: one of each workload a round. Each round begins with the next workload.

    Args:
        samples: by workload, a function that takes a sample.
        failed: if given, a workload that raises AdtrainError is left out from then on, and its message is put here. The
            error of the first workload is always raised.
    """
    names, found = list(samples), {name: list[T]() for name in samples}
    for first in range(rounds):
        for name in (*names[first % len(names) :], *names[: first % len(names)]):
            if name not in found:
                continue
            try:
                found[name].append(samples[name]())
            except AdtrainError as error:
                if failed is None or name == names[0]:
                    raise
                failed[name] = str(error)
                del found[name]
    return found


def ratio(one: Timing, other: Timing) -> Timing:
    """`one` over `other`, round by round, without a unit. Both are from one call of `alternate`."""
    return Timing([a / b for a, b in zip(one.ms, other.ms, strict=True)])


def rate(amount: float, ms: float) -> float | None:
    """Billions a second; None where the clock saw no time pass."""
    return amount / ms * 1e-6 if ms > 0 else None


def sample_length(
    workload: Workload, finish: Callable[[], object], clock: Clock, least_ms: float, most: int = MAX_REPEATS
) -> tuple[int, float]:
    """The number of runs in a sample of at least `least_ms`, and the seconds of the sample."""
    repeats = 1
    while (elapsed := sample_seconds(workload, finish, repeats, clock)) * 1e3 < least_ms and repeats < most:
        factor = least_ms / (elapsed * 1e3) if elapsed > 0 else math.inf
        repeats = min(repeats * math.ceil(min(max(1.1 * factor, 2), 10)), most)
    return repeats, elapsed


def sample_seconds(workload: Workload, finish: Callable[[], object], repeats: int, clock: Clock) -> float:
    """The seconds of `repeats` runs."""
    start = clock()
    workload(repeats)
    finish()
    return clock() - start


CONFIDENCE = 0.95

MIN_COUNT = 6
"""With fewer samples, not even minimum and maximum enclose the median with CONFIDENCE: 1 - 2 / 2**5 < 0.95."""

FENCE = 1.5
"""A sample further than this many interquartile ranges from the quartiles is an outlier."""


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median with at least CONFIDENCE, for any distribution.

    The number of samples below the median has the binomial distribution B(n, 1/2). The k-th smallest and the k-th
    largest sample therefore enclose it with probability 1 - 2 P(B < k), and k is the largest with enough confidence
    (H. A. David and H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1).

    Raises:
        ValueError: there are fewer than MIN_COUNT samples.
    """
    if len(samples) < MIN_COUNT:
        raise ValueError(f"median_interval: found {len(samples)} samples, expected at least {MIN_COUNT}")
    ordered, k = sorted(samples), rank(len(samples))
    return ordered[k - 1], ordered[-k]


@cache
def rank(count: int) -> int:
    """The k of `median_interval`, for `count` samples."""
    k, below = 0, 0.0
    while (below := below + comb(count, k) / 2**count) <= (1 - CONFIDENCE) / 2:
        k += 1
    return k


def outliers(samples: Sequence[float]) -> tuple[float, ...]:
    """The samples more than FENCE interquartile ranges from the quartiles, in their order (J. W. Tukey, Exploratory
    Data Analysis, 1977)."""
    low, high = percentiles(samples, [25, 75])
    reach = FENCE * (high - low)
    return tuple(x for x in samples if x < low - reach or x > high + reach)
