"""This machine: its CPU, memory and BLAS, and how busy it is."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np

from adtrain.backends.cpu.threads import usable_cores
from adtrain.core.backend import backend
from adtrain.data.file_array import machine_memory

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


def busy_cores() -> float:
    """The number of cores that other processes, or other guests of the host, keep busy while this process sleeps
    WINDOW_S."""
    import psutil

    return psutil.cpu_percent(WINDOW_S) / 100 * (os.cpu_count() or 1)


def is_busy(load: float | None, cores: int | None) -> bool:
    """Whether `load` busy cores of `cores` are too many for measurements; False where either is unknown."""
    return load is not None and cores is not None and load > BUSY * cores


def blas_name() -> str:
    """Name and version of the BLAS that NumPy was built with."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def blas_threads() -> int | None:
    """The number of threads of the BLAS that NumPy loaded; None for one that threadpoolctl does not know."""
    from threadpoolctl import threadpool_info

    return next((library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"), None)
