"""The watchdog of a job, with its ranks in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from time import monotonic

import pytest
from waiting import wait_until

from adtrain.distributed import launch as module
from adtrain.distributed.launch import Watchdog, WatchdogClient

SECONDS = 60.0


class Job:
    """A watchdog and its only rank."""

    def __init__(self) -> None:
        self.lines: list[str | None] = []
        self.watchdog = Watchdog(1, SECONDS, "token", self.lines.append)
        address = ("127.0.0.1", self.watchdog.port)
        self.rank = WatchdogClient(address, "token", 0, lambda: (0, 0), lambda: None, SECONDS, None)
        wait_until(lambda: any(rank.rank == 0 for rank in self.watchdog.known.values()))

    def close(self) -> None:
        self.watchdog.dismiss()
        self.watchdog.thread.join()
        for connection in (*self.watchdog.known, self.watchdog.listener):
            connection.close()
        self.watchdog.selector.close()
        wait_until(self.rank.over.is_set)
        self.rank.close()
        self.rank.connection.close()


@pytest.fixture
def job() -> Iterator[Job]:
    with closing(Job()) as job:
        yield job


def test_a_job_that_was_stopped_by_ctrl_z_continues(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z and `fg`: no rank could answer in that time."""
    monkeypatch.setattr(module, "monotonic", lambda: monotonic() + 10 * SECONDS)
    before = job.watchdog.now
    wait_until(lambda: job.watchdog.now > before + module.BEAT_SECONDS)
    assert job.lines == []


def test_the_exit_code_is_that_of_the_first_rank_that_fails(job: Job) -> None:
    assert job.watchdog.code is None
    job.rank.send(failed="it broke", code=143)
    wait_until(lambda: job.watchdog.over)
    assert job.watchdog.code == 143
