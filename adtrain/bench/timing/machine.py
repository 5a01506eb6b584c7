"""This machine: its CPU, memory and BLAS, and how busy it is."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.backends.cpu.threads import usable_cores
from adtrain.core.backend import backend
from adtrain.data.file_array import machine_memory

WINDOW_S = 0.25
"""How long the load is observed; the counters advance in steps of 10 ms."""

PROC_STAT = Path("/proc/stat")
BLAS_THREADS = tuple(f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", ""))
"""The functions of OpenBLAS, by the names that NumPy's and other builds give them."""

BUSY = 0.2
"""Share of the cores that other work may keep busy; above it, threads wait for one another."""


def describe_cpu() -> dict[str, Any]:
    """Name, cores, memory and libraries of the CPU; None where unknown."""
    return {
        "name": backend("cpu").device_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": machine_memory(),
        "compiler": backend("cpu").compiler_name(),
        "blas": blas_name(),
        "blas_threads": blas_threads(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def thread_count() -> int:
    """$OMP_NUM_THREADS if it is a number above 0, but at most the number of usable cores."""
    given, cores = os.environ.get("OMP_NUM_THREADS", ""), usable_cores() or 1
    return min(int(given), cores) if given.isdecimal() and int(given) else cores


def busy_cores() -> float | None:
    """The number of cores that other processes, or other guests of the host, keep busy while this process sleeps
    WINDOW_S; None on systems without PROC_STAT."""
    try:
        before = processor_ticks(PROC_STAT.read_text(encoding="utf-8"))
        time.sleep(WINDOW_S)
        after = processor_ticks(PROC_STAT.read_text(encoding="utf-8"))
    except OSError:
        return None
    busy, elapsed = (x - y for x, y in zip(after, before, strict=True))
    return busy / max(elapsed, 1) * (os.cpu_count() or 1)


def processor_ticks(text: str) -> tuple[int, int]:
    """The ticks in which cores had work, and all, since the system started; by the first line of PROC_STAT.

    Its columns are user, nice, system, idle, iowait, irq, softirq and steal. What follows is part of user and nice.
    """
    ticks = [int(x) for x in text.partition("\n")[0].split()[1:9]]
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


def is_busy(load: float | None, cores: int | None) -> bool:
    """Whether `load` busy cores of `cores` are too many for measurements; False where either is unknown."""
    return load is not None and cores is not None and load > BUSY * cores


def blas_name() -> str:
    """Name and version of the BLAS that NumPy was built with."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def blas_threads() -> int | None:
    """The number of threads of the BLAS that NumPy loaded; None where it is not found, or has none of BLAS_THREADS."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    libraries = {path for line in lines if "blas" in os.path.basename(path := line.split(maxsplit=5)[-1])}
    functions = (getattr(ctypes.CDLL(path), name, None) for path in sorted(libraries) for name in BLAS_THREADS)
    return next((int(function()) for function in functions if function is not None), None)
