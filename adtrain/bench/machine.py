"""The machine of a measurement: its CPU and load, its roofline, and the protocol, by which others judge and repeat it.

A roofline is a device's best memory bandwidth and arithmetic rate, as adtrain's own kernels reach them.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

import adtrain
from adtrain import __version__, ops
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench import sampling
from adtrain.bench.sampling import measure, rate
from adtrain.cache import digest, find_document, store_document
from adtrain.config.records import Duration
from adtrain.core.array import array
from adtrain.core.backend import backend
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.data.file_array import machine_memory
from adtrain.ops.matmul import matmul_p
from adtrain.option_types import Size
from adtrain.text import invocation

Progress: TypeAlias = Callable[[str], object]
"""Gets lines for the user."""

WINDOW_S = 0.25
"""How long the load is observed; the counters advance in steps of 10 ms."""

PROC_STAT = Path("/proc/stat")
BLAS_THREADS = tuple(f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", ""))
"""The functions of OpenBLAS, by the names that NumPy's and other builds give them."""

BUSY = 0.2
"""Share of the cores that other work may keep busy; above it, threads wait for one another."""


def describe_cpu() -> dict[str, Any]:
    """Name, cores, memory and libraries of the CPU; None where unknown. The BLAS is that which NumPy was built with."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "name": backend("cpu").device_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": machine_memory(),
        "compiler": backend("cpu").compiler_name(),
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
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


def blas_threads() -> int | None:
    """The number of threads of the BLAS that NumPy loaded; None where it is not found, or has none of BLAS_THREADS."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    libraries = {path for line in lines if "blas" in os.path.basename(path := line.split(maxsplit=5)[-1])}
    functions = (getattr(ctypes.CDLL(path), name, None) for path in sorted(libraries) for name in BLAS_THREADS)
    return next((int(function()) for function in functions if function is not None), None)


ROOFLINE = "roofline"

COPY_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31}
"""Much larger than the caches."""

MATRIX = {"cpu": 1024, "gpu": 4096}
"""Rows and columns of the square matrices."""


@dataclass(frozen=True)
class Roofline:
    """The best rates of a device.

    Attributes:
        gbytes_per_s: of a large copy; bytes read and bytes written both count.
        gflops_per_s: of matrix products, by dtype or precision of their operands.
    """

    gbytes_per_s: float
    gflops_per_s: Mapping[str, float]

    def share(self, flops: int, bytes: int, ms: float, precision: str = "float32") -> float:
        """The share of the roofline that work reaches: its minimum time on this device over `ms`, the time it took."""
        peak = self.gflops_per_s.get(precision, self.gflops_per_s["float32"])
        return max(flops / peak, bytes / self.gbytes_per_s) * 1e-6 / ms


def known_roofline(device: str) -> Roofline | None:
    """The stored roofline of the device with this driver and this version of adtrain; None if it was not measured."""
    return find_document(ROOFLINE, _roofline_key(device), _read)


def measured_roofline(device: str) -> Roofline:
    """Measure the roofline, in a few seconds, and store it unless the machine is busy."""
    busy = is_busy(busy_cores(), usable_cores())
    copy_ms = measure(_copy(device), backend(device).synchronize).median_ms
    copied = rate(2 * COPY_BYTES[device], copy_ms) or 0.0
    n = MATRIX[device]
    flops: dict[str, float] = {}
    for name, work in _products(device, n):
        ms = measure(work, backend(device).synchronize).median_ms
        flops[name] = max(flops.get(name, 0.0), rate(2 * n**3, ms) or 0.0)
    found = Roofline(copied, flops)
    if not busy:
        store_document(ROOFLINE, _roofline_key(device), vars(found))
    return found


def known_or_measured(device: str, progress: Progress) -> Roofline:
    """The stored roofline. If there is none, measure it, with a line to `progress`."""
    found = known_roofline(device)
    if found is None:
        progress(f"bench: measuring the peak rates of the {device}, a few seconds")
        found = measured_roofline(device)
    return found


def _copy(device: str) -> Callable[[], object]:
    """Copies COPY_BYTES within the device's memory; on the CPU with all cores."""
    size = COPY_BYTES[device]
    if device == "cpu":
        cores = usable_cores() or 1
        source, target = (np.array_split(np.ones(size, np.uint8), cores) for _ in range(2))
        threads = ThreadPoolExecutor(cores)
        return lambda: list(threads.map(np.copyto, target, source))
    gpu: Any = backend(device)
    memory = [gpu.device.reserve(size) for _ in range(2)]
    return lambda: gpu.device.copy(int(memory[0]), int(memory[1]), size)


def _products(device: str, n: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Precision and function of each way to multiply two random matrices."""
    rng = np.random.default_rng(0)
    for dtype in ("float64", "float32"):
        a, b = (array(rng.standard_normal((n, n)).astype(dtype), device=device) for _ in range(2))
        for product in (ops.matmul, stage(ops.matmul)):
            yield dtype, partial(product, a, b)
    if device == "gpu":
        for precision in ("tf32", "bfloat16"):
            params: dict[str, Any] = {"transpose_a": False, "transpose_b": False, "precision": precision}
            yield precision, partial(bind, matmul_p, a, b, **params)


def _roofline_key(device: str) -> str:
    return digest(device, backend(device).identity(), str(usable_cores()), __version__)


def _read(document: Any) -> Roofline:
    """What `measured_roofline` stored. Raises ValueError for another document."""
    try:
        found = Roofline(**document)
        rates = [found.gbytes_per_s, *found.gflops_per_s.values()]
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    if "float32" not in found.gflops_per_s or not all(isinstance(x, float) and 0 < x < math.inf for x in rates):
        raise ValueError("its rates are not numbers above 0")
    return found


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What measured work did in its time, and how close it came to the limits of its device.

    Attributes:
        gflops_per_s, gbytes_per_s: None if the time is 0.
        of_roofline: the share of the device's roofline; None if the time is 0.
        from_cache: whether the bytes came faster than the device's memory can deliver them, so from a cache. The share
            is then above 1, and says nothing about the kernel.
    """

    flops: int
    bytes: int
    gflops_per_s: float | None
    gbytes_per_s: float | None
    of_roofline: float | None
    from_cache: bool | None = None


def rates(flops: int, bytes: int, ms: float, peak: Roofline, precision: str = "float32") -> Rates:
    """The rates of work with these FLOPs and bytes that took `ms` milliseconds."""
    moved = rate(bytes, ms)
    return Rates(
        flops=flops,
        bytes=bytes,
        gflops_per_s=rate(flops, ms),
        gbytes_per_s=moved,
        of_roofline=peak.share(flops, bytes, ms, precision) if ms > 0 else None,
        from_cache=(moved or 0.0) > peak.gbytes_per_s,
    )


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
        driver, clock_mhz, memory_clock_mhz: of a GPU; the clocks are the highest ones.
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


def observed_load(progress: Progress) -> float | None:
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
    cpu, peak, made = describe_cpu(), peak or known_roofline(device), invocation()
    gpu: dict[str, Any] = {} if device == "cpu" else cast(Any, backend(device)).properties()
    clocks = gpu["devices"][0] if gpu else {}
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
        driver=gpu.get("driver"),
        clock_mhz=clocks.get("clock_mhz"),
        memory_clock_mhz=clocks.get("memory_clock_mhz"),
        versions={"adtrain": adtrain.__version__, "python": cpu["python"], "numpy": cpu["numpy"]},
        clock={
            "operations": "the device's own: CUDA events" if device == "gpu" else "read by the compiled program",
            "steps": "the host's, until the device has finished",
        },
        confidence=sampling.CONFIDENCE,
        samples=(sampling.MIN_SAMPLES, sampling.MAX_SAMPLES),
        min_sample_ms=min_sample_ms,
        overhead_ms=measure(lambda: None).median_ms,
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
