"""The roofline of a device: its best memory bandwidth and arithmetic rate, as adtrain's own kernels reach them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from adtrain import __version__, ops
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench.timing.machine import busy_cores, is_busy
from adtrain.bench.timing.sampling import measure, rate
from adtrain.cache import digest, find_document, store_document
from adtrain.core.array import array
from adtrain.core.backend import backend
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.ops.matmul import matmul_p

KIND = "roofline"

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


def known(device: str) -> Roofline | None:
    """The stored roofline of the device with this driver and this version of adtrain; None if it was not measured."""
    return find_document(KIND, _key(device), _read)


def measured(device: str) -> Roofline:
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
        store_document(KIND, _key(device), vars(found))
    return found


def known_or_measured(device: str, progress: Callable[[str], object]) -> Roofline:
    """The stored roofline. If there is none, measure it, with a line to `progress`."""
    found = known(device)
    if found is None:
        progress(f"bench: measuring the peak rates of the {device}, a few seconds")
        found = measured(device)
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


def _key(device: str) -> str:
    return digest(device, backend(device).identity(), str(usable_cores()), __version__)


def _read(document: Any) -> Roofline:
    """What `measured` stored. Raises ValueError for another document."""
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
