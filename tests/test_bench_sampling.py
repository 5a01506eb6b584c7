from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.bench import sampling
from adtrain.bench.sampling import (
    MAX_SAMPLES,
    MIN_SAMPLE_MS,
    MIN_SAMPLES,
    WARMUP_RUNS,
    Time,
    Timing,
    alternate,
    in_turns,
    measure,
    ratio,
    repeatedly,
)
from adtrain.core.errors import AdtrainError


class Machine:
    """Simulated work with its own clock: run i takes seconds[i], later runs the last of them."""

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
def test_time_of_one_run_is_measured_at_any_scale(seconds: float) -> None:
    machine = Machine(seconds)
    found = measure(machine.work, clock=machine.clock)
    assert found.median_ms == pytest.approx(seconds * 1e3)
    time = found.record()
    assert (time.low_ms, time.high_ms) == pytest.approx((seconds * 1e3,) * 2)
    assert MIN_SAMPLES <= len(found.ms) <= MAX_SAMPLES


def test_known_time_is_measured_within_a_percent() -> None:
    """By the processor time of this thread, which other work on the machine does not add to."""

    def work_a_millisecond() -> None:
        end = thread_time() + 1e-3
        while thread_time() < end:
            pass

    assert 0.999 <= measure(work_a_millisecond, clock=thread_time).median_ms <= 1.01


def test_short_work_is_repeated_to_fill_a_sample() -> None:
    machine = Machine(1e-6)
    found = measure(machine.work, clock=machine.clock)
    assert found.repeats * 1e-6 * 1e3 >= MIN_SAMPLE_MS
    assert found.repeats * 1e-6 * 1e3 < 10 * MIN_SAMPLE_MS
    work = {"": repeatedly(machine.work)}
    assert alternate(work, clock=machine.clock, min_sample_ms=1e-3)[""].repeats < 10


def test_long_work_runs_for_the_minimum_number_of_samples_only() -> None:
    for seconds, warmups in ((0.3, WARMUP_RUNS), (3.0, 1)):
        machine = Machine(seconds)
        assert measure(machine.work, clock=machine.clock).ms == pytest.approx([seconds * 1e3] * MIN_SAMPLES)
        assert machine.runs == warmups + 1 + MIN_SAMPLES


def test_warm_up_is_not_sampled() -> None:
    machine = Machine(*[100.0] * (WARMUP_RUNS + 1), 0.05)
    assert measure(machine.work, clock=machine.clock).record().p80_ms == pytest.approx(50)


def test_percentiles_of_samples() -> None:
    found = Timing([1.0, 2.0, 3.0, 4.0, 15.0, 6.0]).record()
    assert (found.median_ms, found.p20_ms, found.p80_ms) == pytest.approx((3.5, 2.0, 6.0))


def test_coarse_clock_gets_more_repeats() -> None:
    machine = Machine(1e-5)
    found = measure(machine.work, clock=lambda: round(machine.now, 3))  # ticks in milliseconds
    assert found.repeats * 1e-5 * 1e3 >= MIN_SAMPLE_MS / 2
    assert found.median_ms == pytest.approx(1e-2, rel=0.5)


def test_clock_that_never_advances_ends_at_the_maximum_of_samples() -> None:
    found = measure(lambda: None, clock=lambda: 0.0)
    assert (found.median_ms, len(found.ms)) == (0.0, MAX_SAMPLES)


def test_device_is_synchronized_once_a_sample() -> None:
    machine = Machine(0.1)
    measure(machine.work, machine.wait, machine.clock)
    assert machine.waits == machine.runs == WARMUP_RUNS + 1 + MIN_SAMPLES


def test_record_lists_outliers_and_keeps_them_in_the_median() -> None:
    found = Timing([1.0] * 5 + [1.01] * 4 + [9.0], repeats=3).record()
    assert found == Time(1.005, 1.0, 1.01, 1.0, 1.01, 10, 3, [9.0], False)


def test_a_workload_that_fails_is_left_out_unless_it_is_the_first() -> None:
    taken: list[str] = []

    def sample(name: str) -> str:
        taken.append(name)
        if name in "bx" and taken.count(name) == 2:
            raise AdtrainError(f"{name} fails")
        return name

    failed: dict[str, str] = {}
    found = in_turns({name: partial(sample, name) for name in "abc"}, 3, failed)
    assert "".join(taken) == "abcbcaca"
    assert (found, failed) == ({"a": ["a"] * 3, "c": ["c"] * 3}, {"b": "b fails"})
    for first, errors in (("b", failed), ("xb", None)):
        taken.clear()
        with pytest.raises(AdtrainError, match=r"^[bx] fails$"):
            in_turns({name: partial(sample, name) for name in first}, 3, errors)


def test_wide_interval_is_noisy() -> None:
    assert not Timing([1.0, 1.04] * 5).record().noisy
    assert Timing([1.0, 1.06] * 5).record().noisy


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, ["aabbcc", "bbccaa", "ccaabb"]), (1.0, ["abc", "bca", "cab"])])
def test_samples_are_interleaved_and_each_round_begins_with_another_workload(seconds: float, rounds: list[str]) -> None:
    """Each short sample follows a warm-up."""
    machine, order = Machine(seconds), list[str]()

    def named(name: str) -> Callable[[int], None]:
        def work(times: int) -> None:
            order.append(name)
            machine.work()

        return work

    found = alternate({name: named(name) for name in "abc"}, clock=machine.clock)
    length = len(rounds[0])
    taken = "".join(order[-length * MIN_SAMPLES :])
    assert [taken[i : i + length] for i in range(0, 3 * length, length)] == rounds
    assert {name: len(each.ms) for name, each in found.items()} == dict.fromkeys("abc", MIN_SAMPLES)


@given(st.floats(1e-4, 0.02))
def test_ratio_is_stable_on_a_machine_that_slows_down(drift: float) -> None:
    """Workloads of 3 and 2 seconds on a machine that becomes slower with every run."""
    now, speed = [0.0], [1.0]

    def lasting(seconds: float) -> Callable[[int], None]:
        def work(times: int) -> None:
            speed[0] *= 1 + drift
            now[0] += times * seconds * speed[0]

        return work

    found = alternate({"long": lasting(3.0), "short": lasting(2.0)}, clock=lambda: now[0])
    assert max(found["long"].ms) > min(found["long"].ms) * (1 + drift)
    times = ratio(found["long"], found["short"]).record()
    assert times.low_ms <= 1.5 * (1 + 1e-9)
    assert times.high_ms >= 1.5 * (1 - 1e-9)
    assert times.high_ms / times.low_ms < (1 + drift) ** 4.1


def test_garbage_collector_is_off_while_sampling_and_on_after_an_error() -> None:
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        raise RuntimeError

    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        measure(work)
    assert seen == [False]
    assert gc.isenabled()


def test_budget_sets_the_number_of_samples() -> None:
    machine = Machine(sampling.BUDGET_MS * 1e-3 / 12)
    assert len(measure(machine.work, clock=machine.clock).ms) == 12
