from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from adtrain.bench import machine

STAT = "cpu  {} 5 20 {} 10 1 2 3 900 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n"
"""Columns after the eighth, times of guests, are part of the first two."""


def test_busy_cores_are_a_share_of_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    assert 0 <= (machine.busy_cores() or 0) <= cores
    stat = tmp_path / "stat"
    stat.write_text(STAT.format(100, 1000))
    monkeypatch.setattr(machine, "PROC_STAT", stat)
    monkeypatch.setattr("time.sleep", lambda _: stat.write_text(STAT.format(125, 1075)))
    assert machine.busy_cores() == 0.25 * cores


def test_the_load_is_unknown_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC_STAT", tmp_path / "none")
    assert machine.busy_cores() is None


@pytest.mark.skipif(machine.blas_threads() is None, reason="NumPy has no OpenBLAS that tells its threads")
def test_threads_of_the_blas_are_those_that_it_uses() -> None:
    before = machine.blas_threads()
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({path for line in lines if "blas" in os.path.basename(path := line.split()[-1])})  # SciPy has others
    names = [name.replace("_get_", "_set_") for name in machine.BLAS_THREADS]
    libraries = map(ctypes.CDLL, paths)
    limit = next(getattr(x, name) for x in libraries for name in names if hasattr(x, name))
    try:
        limit(2)
        assert machine.blas_threads() == 2
        limit(1)
        assert machine.blas_threads() == 1
    finally:
        limit(before)


def test_machine_is_busy_above_a_fifth_of_its_cores() -> None:
    assert machine.is_busy(0.5, 2)
    assert not machine.is_busy(0.3, 2)
    assert not machine.is_busy(None, 2)
    assert not machine.is_busy(1.0, None)
