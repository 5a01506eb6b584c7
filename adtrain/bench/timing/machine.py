"""This machine: its CPU, memory and BLAS, and how busy it is."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np

from adtrain.core.backend import backend

WINDOW_S = 0.25
"""How long the load is observed; the counters advance in steps of 10 ms."""

BUSY = 0.2
"""Share of the cores that other work may keep busy; above it, threads wait for one another."""


def describe_cpu() -> dict[str, Any]:
    """Name, cores, memory and libraries of the CPU; None where unknown."""
    return {
        "name": backend("cpu").device_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "compiler": backend("cpu").compiler_name(),
        "blas": blas_name(),
        "blas_threads": blas_threads(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def usable_cores() -> int | None:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def thread_count() -> int:
    """$OMP_NUM_THREADS if it is a number above 0, else the number of usable cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else usable_cores() or 1


def busy_cores() -> float | None:
    """The number of cores that other processes, or other guests of the host, keep busy while this process sleeps
    WINDOW_S; None without /proc/stat."""
    before = _core_seconds()
    sleep(WINDOW_S)
    after = _core_seconds()
    if before is None or after is None:
        return None
    spent, idle = (b - a for a, b in zip(before, after, strict=True))
    return (1 - idle / spent) * (os.cpu_count() or 1) if spent > 0 else None


def is_busy(load: float | None, cores: int | None) -> bool:
    """Whether `load` busy cores of `cores` are too many for measurements; False where either is unknown."""
    return load is not None and cores is not None and load > BUSY * cores


def _core_seconds() -> tuple[int, int] | None:
    """The time of all cores since boot, and their idle time, in ticks; see proc(5)."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_bytes().split(b"\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(fields), fields[3] + fields[4]


def memory_bytes() -> int | None:
    """Physical memory; None if `sysconf` does not know it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def blas_name() -> str:
    """Name and version of the BLAS that NumPy was built with."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def blas_threads() -> int | None:
    """The number of threads of NumPy's OpenBLAS, as the loaded library reports it; None for another BLAS or system."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    libraries = {line.split(maxsplit=5)[5] for line in maps if "openblas" in line.lower()}
    for library in sorted(libraries):
        for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
            if hasattr(loaded := ctypes.CDLL(library), name):
                return int(getattr(loaded, name)())
    return None
