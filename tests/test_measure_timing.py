from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from adtrain.measure import timing
from adtrain.measure.timing import MAX_SAMPLES, MIN_SAMPLE_MS, MIN_SAMPLES, WARMUP_RUNS, Timing, measure, overhead_ms


class Machine:
    """Work that takes the given seconds, one after the other and then always the last, on a clock of its own."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.runs = self.waits = 0
        self.durations: Iterator[float] = chain(seconds, repeat(seconds[-1]))

    def clock(self) -> float:
        return self.now

    def work(self) -> None:
        self.runs += 1
        self.now += next(self.durations)

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("seconds", [1e-7, 3e-5, 1e-3, 0.004, 2.0])
def test_the_time_of_one_run_is_found_whatever_it_is(seconds: float) -> None:
    machine = Machine(seconds)
    found = measure(machine.work, clock=machine.clock)
    assert found.median_ms == pytest.approx(seconds * 1e3)
    assert found.p20_ms == pytest.approx(found.p80_ms)
    assert MIN_SAMPLES <= found.samples <= MAX_SAMPLES


def test_short_work_is_repeated_until_a_sample_is_long_enough_for_the_clock() -> None:
    machine = Machine(1e-6)
    found = measure(machine.work, clock=machine.clock)
    assert found.repeats * 1e-6 * 1e3 >= MIN_SAMPLE_MS
    assert found.repeats * 1e-6 * 1e3 < 10 * MIN_SAMPLE_MS


def test_long_work_runs_no_more_often_than_the_least_number_of_samples_needs() -> None:
    machine = Machine(3.0)
    assert measure(machine.work, clock=machine.clock) == Timing(3000, 3000, 3000, MIN_SAMPLES, 1)
    assert machine.runs == WARMUP_RUNS + 1 + MIN_SAMPLES


def test_warm_up_is_not_counted() -> None:
    machine = Machine(*[100.0] * (WARMUP_RUNS + 1), 0.05)
    assert measure(machine.work, clock=machine.clock).p80_ms == pytest.approx(50)


def test_percentiles_are_those_of_the_samples() -> None:
    found = timing.summarize([0.001, 0.002, 0.003, 0.004, 0.015, 0.006])
    assert (found.median_ms, found.p20_ms, found.p80_ms) == pytest.approx((3.5, 2.0, 6.0))
    assert timing.summarize([0.004], repeats=4).median_ms == pytest.approx(1.0)


def test_a_clock_that_stands_still_at_first_ends_in_more_repeats() -> None:
    machine = Machine(1e-5)
    found = measure(machine.work, clock=lambda: round(machine.now, 3))  # ticks in milliseconds
    assert found.repeats * 1e-5 * 1e3 >= MIN_SAMPLE_MS / 2
    assert found.median_ms == pytest.approx(1e-2, rel=0.5)


def test_the_device_is_waited_for_once_a_sample() -> None:
    machine = Machine(1.0)
    measure(machine.work, machine.wait, machine.clock)
    assert machine.waits == machine.runs - WARMUP_RUNS


def test_noisy_is_a_wide_spread() -> None:
    assert not Timing(1.0, 1.0, 1.2, 5, 1).noisy
    assert Timing(1.0, 0.8, 1.2, 5, 1).noisy


def test_the_overhead_is_the_time_of_nothing() -> None:
    ticks = iter(range(10**9))
    # every look at the clock takes one second, so that a run of nothing is a sample of its own
    assert overhead_ms(lambda: float(next(ticks))) == 1000.0


def test_garbage_is_not_collected_meanwhile_and_is_again_after_a_failure() -> None:
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        raise RuntimeError

    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        measure(work)
    assert seen == [False]
    assert gc.isenabled()
