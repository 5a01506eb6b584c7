"""What measured numbers were measured with, so that they can be judged, and measured again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import adtrain
from adtrain.bench.timing import roofline, sampling, statistics
from adtrain.bench.timing.machine import busy_cores, describe_cpu, is_busy
from adtrain.bench.timing.roofline import Roofline
from adtrain.core.backend import backend

PACKAGE = Path(adtrain.__file__).parent

THREADING = ("OMP_", "GOMP_", "OPENBLAS_", "MKL_")
"""What the names of environment variables that decide about threads begin with."""


def protocol(
    device: str, peak: Roofline | None = None, min_sample_ms: float = sampling.MIN_SAMPLE_MS
) -> dict[str, Any]:
    """Where, when and how; None for what cannot be found out. `load` is how many cores other work takes before anything
    is timed.

    Args:
        peak: the device's roofline, by default the known one.
        min_sample_ms: the least that a sample takes.
    """
    cpu, peak = describe_cpu(), peak or roofline.known(device)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "device": device,
        "device_name": backend(device).device_name(),
        "load": busy_cores(),
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
        "confidence": statistics.CONFIDENCE,
        "samples": [sampling.MIN_SAMPLES, sampling.MAX_SAMPLES],
        "min_sample_ms": min_sample_ms,
        "overhead_ms": sampling.overhead_ms(),
        "roofline": peak and peak._asdict(),
    }


def busy(conditions: Mapping[str, Any]) -> str | None:
    """A warning where a protocol says that the machine had other work to do."""
    load, cores = conditions.get("load"), conditions.get("cores")
    if not is_busy(load, cores):
        return None
    return f"busy machine: other work took {load:.1f} of {cores} cores before anything was timed"


def commit() -> str | None:
    """$GIT_COMMIT, or else what `git describe` says of the repository that adtrain is run from."""
    if given := os.environ.get("GIT_COMMIT"):
        return given
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _clocks(device: str) -> dict[str, Any]:
    """The GPU's driver and its highest clocks in MHz."""
    if device == "cpu":
        return {"driver": None, "clock_mhz": None, "memory_clock_mhz": None}
    gpu: Any = backend(device)
    about = gpu.properties()
    first = about["devices"][0]
    return {"driver": about["driver"], "clock_mhz": first["clock_mhz"], "memory_clock_mhz": first["memory_clock_mhz"]}
