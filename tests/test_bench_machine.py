from __future__ import annotations

import os

import psutil
import pytest
from threadpoolctl import threadpool_limits

from adtrain.bench.timing import machine


def test_busy_cores_are_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    assert 0 <= machine.busy_cores() <= cores
    monkeypatch.setattr(psutil, "cpu_percent", lambda window: 25.0)
    assert machine.busy_cores() == 0.25 * cores


def test_threads_of_the_blas_are_those_that_it_uses() -> None:
    with threadpool_limits(1, user_api="blas"):
        assert machine.blas_threads() in (1, None)


def test_machine_is_busy_above_a_fifth_of_its_cores() -> None:
    assert machine.is_busy(0.5, 2)
    assert not machine.is_busy(0.3, 2)
    assert not machine.is_busy(None, 2)
    assert not machine.is_busy(1.0, None)
