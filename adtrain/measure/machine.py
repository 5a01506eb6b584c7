"""What this machine is, as far as it decides how fast anything runs."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.core.backend import backend


def describe_cpu() -> dict[str, Any]:
    """Name, cores, memory and libraries of the CPU; None for what the operating system does not tell."""
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


def memory_bytes() -> int | None:
    """Physical memory, None where `sysconf` does not know it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def blas_name() -> str:
    """The linear algebra library that this NumPy was built with, with its version."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def blas_threads() -> int | None:
    """How many threads NumPy's OpenBLAS uses, asked of the loaded library; None for another BLAS or system."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    libraries = {line.split(maxsplit=5)[5] for line in maps if "openblas" in line.lower()}
    for library in sorted(libraries):
        for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
            if hasattr(loaded := ctypes.CDLL(library), name):
                return int(getattr(loaded, name)())
    return None
