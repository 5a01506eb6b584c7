from __future__ import annotations

import os
import sys

import pytest

from adtrain.bench.timing import machine


@pytest.mark.parametrize(("idle", "load"), [(100, 0.0), (75, 0.25), (0, 1.0)])
def test_busy_cores_are_counted_from_idle_time(monkeypatch: pytest.MonkeyPatch, idle: int, load: float) -> None:
    """The counters hold the time of all cores and their idle time, in ticks."""
    counters = iter([(1000, 400), (1100, 400 + idle)])
    monkeypatch.setattr(machine, "_core_seconds", lambda: next(counters))
    monkeypatch.setattr(machine, "WINDOW_S", 0.0)
    assert machine.busy_cores() == pytest.approx(load * (os.cpu_count() or 1))


def test_busy_cores_are_known_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.busy_cores()
    assert (found is not None) == (sys.platform == "linux")
    assert 0 <= (found or 0.0) <= (os.cpu_count() or 1)
    monkeypatch.setattr(machine, "_core_seconds", lambda: None)
    assert machine.busy_cores() is None


def test_machine_is_busy_above_a_fifth_of_its_cores() -> None:
    assert machine.is_busy(0.5, 2)
    assert not machine.is_busy(0.3, 2)
    assert not machine.is_busy(None, 2)
    assert not machine.is_busy(1.0, None)
