"""The protocol of a measurement: machine, versions, clock and sampling, so that others can judge and repeat it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import adtrain
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench.timing import roofline, sampling
from adtrain.bench.timing.machine import busy_cores, describe_cpu, is_busy
from adtrain.bench.timing.roofline import Roofline
from adtrain.core.backend import backend

PACKAGE = Path(adtrain.__file__).parent

THREADING = ("OMP_", "GOMP_", "OPENBLAS_", "MKL_")
"""Prefixes of environment variables that set numbers of threads."""


def observed_load(progress: Callable[[str], object]) -> float | None:
    """The number of cores that other work keeps busy, None if unknown; `progress` gets a line if there are many."""
    load, cores = busy_cores(), usable_cores()
    if is_busy(load, cores):
        progress(f"bench: busy machine: other work takes {load:.1f} of {cores} cores, so times will be noisy")
    return load


def protocol(
    device: str, load: float | None, peak: Roofline | None = None, min_sample_ms: float = sampling.MIN_SAMPLE_MS
) -> dict[str, Any]:
    """The protocol as JSON values; None for what is unknown.

    Args:
        load: the number of cores that other work kept busy before timing; see `observed_load`.
        peak: the device's roofline, by default the stored one.
        min_sample_ms: the minimum duration of a sample.
    """
    cpu, peak = describe_cpu(), peak or roofline.known(device)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "device": device,
        "device_name": backend(device).device_name(),
        "load": load,
        "compiler": backend(device).compiler_name(),
        "cores": cpu["usable_cores"],
        "threads": os.environ.get("OMP_NUM_THREADS") or cpu["usable_cores"],
        "environment": {name: x for name, x in sorted(os.environ.items()) if name.startswith(THREADING)},
        "blas": cpu["blas"],
        "blas_threads": cpu["blas_threads"],
        **_clocks(device),
        "versions": {"adtrain": adtrain.__version__, "python": cpu["python"], "numpy": cpu["numpy"]},
        "clock": {
            "operations": "the device's own: CUDA events" if device == "gpu" else "read by the compiled program",
            "steps": "the host's, until the device has finished",
        },
        "confidence": sampling.CONFIDENCE,
        "samples": [sampling.MIN_SAMPLES, sampling.MAX_SAMPLES],
        "min_sample_ms": min_sample_ms,
        "overhead_ms": sampling.overhead_ms(),
        "roofline": peak and peak._asdict(),
    }


def busy(conditions: Mapping[str, Any]) -> str | None:
    """A warning, if by this protocol the machine was busy."""
    load, cores = conditions.get("load"), conditions.get("cores")
    if not is_busy(load, cores):
        return None
    return f"busy machine: other work took {load:.1f} of {cores} cores before anything was timed"


def commit() -> str | None:
    """$GIT_COMMIT, else `git describe` of the repository that adtrain runs from; None without a repository."""
    if given := os.environ.get("GIT_COMMIT"):
        return given
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _clocks(device: str) -> dict[str, Any]:
    """The GPU's driver and maximum clocks in MHz; None for a CPU."""
    if device == "cpu":
        return {"driver": None, "clock_mhz": None, "memory_clock_mhz": None}
    gpu: Any = backend(device)
    about = gpu.properties()
    first = about["devices"][0]
    return {"driver": about["driver"], "clock_mhz": first["clock_mhz"], "memory_clock_mhz": first["memory_clock_mhz"]}
