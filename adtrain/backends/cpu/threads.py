"""The threads of compiled code: how many there are, that they can be started, and how many of them a Program uses."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from dataclasses import dataclass

from adtrain.core.errors import AdtrainError


class ThreadLimit(AdtrainError):
    """The system does not let this process start the threads of compiled code."""


def check_setting() -> None:
    """Raise AdtrainError where OMP_NUM_THREADS is no number of threads, before OpenMP reads it.

    OpenMP also takes a list, with a number for each level of nested parallel regions.
    """
    given = os.environ.get("OMP_NUM_THREADS", "1")
    numbers = given.split(",")
    if not all(re.fullmatch(r"\s*\+?[0-9]+\s*", n) and 0 < int(n) < 2**31 for n in numbers):
        raise AdtrainError(
            f"OMP_NUM_THREADS: found {given!r}, expected a positive number of threads; change or unset it"
        )


def usable_cores() -> int | None:
    """Cores that this process may run on; None if their number is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@functools.cache
def usable(wanted: int) -> int:
    """`wanted` threads, at most one for each processor that this process may use, with a warning if that is fewer."""
    processors = usable_cores() or wanted
    if wanted <= processors:
        return wanted
    used = f"using {processors}, one for each processor of this process"
    logging.getLogger(__name__).warning("adtrain: warning: %d threads are set for OpenMP; %s", wanted, used)
    return processors


@functools.cache
def require_threads(count: int) -> None:
    """Start and end this many threads. Raises ThreadLimit where the system refuses one. Checked once for each count."""
    done, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=done.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        advice = "raise the limit (ulimit -u), or set OMP_NUM_THREADS to a smaller number"
        raise ThreadLimit(f"only {len(started)} of {count} more threads can be started; {advice}") from None
    finally:
        done.set()
        for thread in started:
            thread.join()


TRIAL_S, TRIAL_RUNS, LONG_TRIAL_S = 0.002, 3, 0.02
"""A trial has at least this duration and this number of runs; or the last duration, whatever their number."""
FIRST_WAIT_S, LAST_WAIT_S, TRIALS = 0.01, 1.0, 1 / 60
"""Time between two trials. It doubles while trials change nothing, up to the second one; and trials lose at most this
share of the time."""
MEASURED_S = 0.0005
"""Runs are timed together if they are shorter than this."""


@dataclass
class _Runs:
    """How long runs took. The older a run, the less it counts."""

    count: float = 0
    seconds: float = 0

    def mean(self) -> float:
        return self.seconds / self.count if self.count else 0.0

    def halve(self) -> None:
        self.count, self.seconds = self.count / 2, self.seconds / 2


class TeamSize:
    """The number of threads for the next runs of a Program: all, or one where that is faster.

    If other programs keep the processors busy, a barrier waits for threads that the system does not run. That can take
    many times as long as a short run. A trial runs the Program on the other number of threads. The number with the
    smaller mean time is used until the next trial. Results do not depend on it.

    Attributes:
        size: the number of threads.
        usual: that of the runs between trials.
        runs: how many runs to time together.
    """

    def __init__(self, most: int) -> None:
        self.size, self.runs = most, 1
        self.usual, self._other = most, 1
        self._times = {most: _Runs(), 1: _Runs()}
        self._warm = False
        self._wait, self._passed, self._tried = FIRST_WAIT_S, 0.0, 0

    def keep(self, size: int) -> None:
        """Use this number of threads from now on, without trials."""
        self.size = self.usual = self._other = size

    def ran(self, runs: int, seconds: float) -> None:
        """Note the duration of `runs` runs on `size` threads, and choose the size of the next ones."""
        if self.usual == self._other:
            return
        if not self._warm:  # the first run reads memory that no cache has
            self._warm = True
            return
        times = self._times[self.size]
        times.count += runs
        times.seconds += seconds
        self.runs = max(1, int(MEASURED_S / max(times.mean(), 1e-9)))
        self._passed += seconds
        if self.size == self.usual:
            if self._passed >= self._wait:
                self.size, self.runs, self._passed, self._tried = self._other, 1, 0, 0
        else:
            self._tried += runs
            enough = TRIAL_S if self._tried >= TRIAL_RUNS else LONG_TRIAL_S
            if self._passed >= enough:
                self._end_trial()

    def _end_trial(self) -> None:
        if self._times[self._other].mean() < self._times[self.usual].mean():
            self.usual, self._other = self._other, self.usual
            self._wait = FIRST_WAIT_S
        else:
            lost = self._passed - self._tried * self._times[self.usual].mean()
            self._wait = max(min(2 * self._wait, LAST_WAIT_S), lost / TRIALS)
        self.size, self._passed = self.usual, 0
        for times in self._times.values():
            times.halve()
