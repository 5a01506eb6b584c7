"""`adtrain devices`: what this machine offers for training, and what it lacks."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import click
import numpy as np

from adtrain.cli.options import json_option, print_json
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError


@click.command(short_help="Show the devices that training can run on.")
@json_option
def command(as_json: bool) -> None:
    """Show the devices that training can run on, and the libraries that decide its speed."""
    cpu = describe_cpu()
    gpu, reason = describe_gpu()
    if as_json:
        print_json({"cpu": cpu, "gpu": gpu, "gpu_reason": reason})
        return
    blas = f"{cpu['blas']}, {cpu['blas_threads'] or 'unknown number of'} threads"
    memory = f"{cpu['memory_bytes'] / 2**30:.1f} GiB" if cpu["memory_bytes"] else "unknown"
    rows = {
        "cpu": f"{cpu['name']}, {cpu['cores']} cores, {cpu['usable_cores']} usable by this process",
        "memory": memory,
        "compiler": cpu["compiler"],
        "blas": blas,
        "numpy": cpu["numpy"],
        "python": cpu["python"],
        "gpu": reason if gpu is None else f"{gpu['name']}, compute capability {gpu['capability']}",
    }
    if gpu is not None:
        rows |= gpu_rows(gpu)
    for key, value in rows.items():
        click.echo(f"{key:10}{value}")


def describe_gpu() -> tuple[dict[str, Any] | None, str | None]:
    """The GPU's properties, or None and why there are none."""
    try:
        found: Any = backend("gpu")
    except DeviceError as error:
        return None, str(error)
    return found.properties(), None


def gpu_rows(gpu: dict[str, Any]) -> dict[str, str]:
    """The GPU's properties as lines of a table."""
    return {
        "  memory": f"{gpu['memory_bytes'] / 2**30:.1f} GiB, {gpu['free_bytes'] / 2**30:.1f} GiB free",
        "  units": f"{gpu['multiprocessors']} multiprocessors, each {gpu['shared_bytes_per_multiprocessor'] >> 10} KiB "
        f"shared memory and {gpu['registers_per_multiprocessor']} registers",
        "  l2": f"{gpu['l2_bytes'] / 2**20:.0f} MiB",
        "  clocks": f"{gpu['clock_mhz']:.0f} MHz, memory {gpu['memory_clock_mhz']:.0f} MHz",
        "  driver": f"CUDA {gpu['driver_cuda']}",
        "  pycuda": f"{gpu['pycuda']}, built for CUDA {gpu['pycuda_cuda']}",
        "  nvrtc": gpu["nvrtc"],
    }


def describe_cpu() -> dict[str, Any]:
    """Name, cores, memory and libraries of the CPU; None for what the operating system does not tell."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": backend("cpu").device_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": memory_bytes(),
        "compiler": backend("cpu").compiler_name(),
        "blas": blas_name(),
        "blas_threads": blas_threads(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


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
