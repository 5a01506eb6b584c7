"""The protocol of a measurement: machine, versions, clock and sampling, so that others can judge and repeat it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adtrain
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench.timing import roofline, sampling
from adtrain.bench.timing.machine import busy_cores, describe_cpu, is_busy
from adtrain.bench.timing.roofline import Roofline
from adtrain.config.values import Duration
from adtrain.core.backend import backend
from adtrain.option_types import Size
from adtrain.templates import invocation

PACKAGE = Path(adtrain.__file__).parent

THREADING = ("OMP_", "GOMP_", "OPENBLAS_", "MKL_")
"""Prefixes of environment variables that set numbers of threads."""


@dataclass(frozen=True)
class Protocol:
    """The conditions of a measurement; None for what is unknown.

    Attributes:
        load: the number of cores that other work kept busy before timing.
        environment: variables that set numbers of threads.
        clock: which clock timed operations, and which steps.
        samples: the fewest and the most of a time.
        overhead_ms: the time of an empty run.
        devices: of a comparison of devices, their names.
        naive: of a comparison of devices, how naive loops are compiled.
    """

    date: str
    command: str
    commit: str | None
    device: str
    device_name: str
    load: Duration | None
    compiler: str | None
    cores: Size | None
    threads: int | str | None
    environment: dict[str, str]
    blas: str
    blas_threads: int | None
    driver: str | None
    clock_mhz: float | None
    memory_clock_mhz: float | None
    versions: dict[str, str]
    clock: dict[str, str]
    confidence: float
    samples: tuple[int, int]
    min_sample_ms: float
    overhead_ms: float
    roofline: Roofline | None
    devices: dict[str, str] | None = None
    naive: str | None = None

    @property
    def busy(self) -> str | None:
        """A warning, if the machine was busy."""
        if not is_busy(self.load, self.cores):
            return None
        return f"busy machine: other work took {self.load:.1f} of {self.cores} cores before anything was timed"

    @property
    def peak(self) -> Roofline:
        """The roofline, of a measurement that needs it."""
        assert self.roofline is not None
        return self.roofline


def observed_load(progress: Callable[[str], object]) -> float | None:
    """The number of cores that other work keeps busy, None if unknown; `progress` gets a line if there are many."""
    load, cores = busy_cores(), usable_cores()
    if is_busy(load, cores):
        progress(f"bench: busy machine: other work takes {load:.1f} of {cores} cores, so times will be noisy")
    return load


def protocol(
    device: str, load: float | None, peak: Roofline | None = None, min_sample_ms: float = sampling.MIN_SAMPLE_MS
) -> Protocol:
    """The protocol of a measurement on this machine.

    Args:
        load: the number of cores that other work kept busy before timing; see `observed_load`.
        peak: the device's roofline, by default the stored one.
        min_sample_ms: the minimum duration of a sample.
    """
    cpu, peak, made = describe_cpu(), peak or roofline.known(device), invocation()
    return Protocol(
        date=made.date,
        command=made.command,
        commit=commit(),
        device=device,
        device_name=backend(device).device_name(),
        load=load,
        compiler=backend(device).compiler_name(),
        cores=cpu["usable_cores"],
        threads=os.environ.get("OMP_NUM_THREADS") or cpu["usable_cores"],
        environment={name: x for name, x in sorted(os.environ.items()) if name.startswith(THREADING)},
        blas=cpu["blas"],
        blas_threads=cpu["blas_threads"],
        **_clocks(device),
        versions={"adtrain": adtrain.__version__, "python": cpu["python"], "numpy": cpu["numpy"]},
        clock={
            "operations": "the device's own: CUDA events" if device == "gpu" else "read by the compiled program",
            "steps": "the host's, until the device has finished",
        },
        confidence=sampling.CONFIDENCE,
        samples=(sampling.MIN_SAMPLES, sampling.MAX_SAMPLES),
        min_sample_ms=min_sample_ms,
        overhead_ms=sampling.overhead_ms(),
        roofline=peak,
    )


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
