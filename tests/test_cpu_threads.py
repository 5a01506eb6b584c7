"""The threads of compiled code: their number by OMP_NUM_THREADS, and the choice between all of them and one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import invoke
from training_runs import write_config

from adtrain.backends.cpu.threads import TeamSize, check_setting, usable
from adtrain.core.errors import AdtrainError


def simulate(team: TeamSize, duration: Callable[[int], float], seconds: float) -> float:
    """The mean time of runs in so many seconds, if a run on some number of threads takes `duration`."""
    passed, count = 0.0, 0
    while passed < seconds:
        taken = sum(duration(team.size) for _ in range(team.runs))
        count, passed = count + team.runs, passed + taken
        team.ran(team.runs, taken)
    return passed / count


@pytest.mark.parametrize("all_threads", [3e-5, 1e-3, 1e-2, 0.2])
def test_all_threads_are_used_if_no_other_program_runs(all_threads: float) -> None:
    mean = simulate(TeamSize(2), lambda size: all_threads * (1 if size == 2 else 1.8), max(20, 300 * all_threads))
    assert mean < 1.02 * all_threads


@pytest.mark.parametrize("one_thread", [5e-5, 1e-3, 0.01])
def test_one_thread_is_used_if_barriers_wait_for_other_programs(one_thread: float) -> None:
    mean = simulate(TeamSize(2), lambda size: one_thread * (1 if size == 1 else 70), max(20, 3000 * one_thread))
    assert mean < 1.15 * one_thread


def test_the_number_of_threads_adapts_to_other_programs() -> None:
    team = TeamSize(2)
    for _ in range(2):
        simulate(team, lambda size: 4e-5 if size == 2 else 6e-5, 10)
        assert simulate(team, lambda size: 4e-5 if size == 2 else 6e-5, 5) < 4.1e-5
        simulate(team, lambda size: 4e-3 if size == 2 else 6e-5, 10)
        assert simulate(team, lambda size: 4e-3 if size == 2 else 6e-5, 5) < 6.9e-5


@pytest.mark.parametrize("all_threads", [1e-3, 0.05, 0.3])
def test_two_slow_runs_do_not_keep_long_runs_on_one_thread(all_threads: float) -> None:
    team = TeamSize(2)
    simulate(team, lambda size: all_threads * (4 if size == 2 else 1.7), 8 * all_threads)
    simulate(team, lambda size: all_threads * (1 if size == 2 else 1.7), 20 * all_threads)
    assert team.size == 2


def test_a_few_fast_runs_between_waits_do_not_change_the_choice() -> None:
    """Of the runs on all threads one in thirty waits for a time slice of another program."""
    runs = iter(range(10**9))
    mean = simulate(TeamSize(2), lambda size: 6e-5 if size == 1 else 4e-3 if next(runs) % 30 == 0 else 3e-5, 30)
    assert mean < 1.15 * 6e-5


def test_a_single_thread_has_no_trials() -> None:
    team = TeamSize(1)
    for _ in range(1000):
        team.ran(1, 1e-4)
        assert team.size == 1


def test_a_kept_number_of_threads_has_no_trials() -> None:
    team = TeamSize(4)
    team.keep(1)
    assert simulate(team, lambda size: 1e-4 if size == 1 else 1e-6, 1) == pytest.approx(1e-4)


@pytest.mark.parametrize("value", ["abc", "", "0", "-2", "1.5", "2,x", "99999999999999999999"])
def test_a_bad_number_of_threads_is_an_error_that_names_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(
        AdtrainError, match=rf"^OMP_NUM_THREADS: found '{value}', expected a positive number of threads"
    ):
        check_setting()


@pytest.mark.parametrize("value", ["1", "4", " 2", "4,2", None])
def test_numbers_that_openmp_reads_are_accepted(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    check_setting()


def test_more_threads_than_processors_are_reduced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    usable.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [usable(100_000), usable(100_000), usable(3), usable(2)] == [3, 3, 3, 2]
    usable.cache_clear()
    line = "adtrain: warning: 100000 threads are set for OpenMP; using 3, one for each processor of this process"
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.compiled
def test_a_training_with_a_bad_number_of_threads_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    found = invoke("train", str(write_config(tmp_path)), "--steps", "1", "--output-dir", "run")
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1] == (
        "adtrain: error: OMP_NUM_THREADS: found 'abc', expected a positive number of threads; change or unset it"
    )
