"""What a GPU is: the numbers that decide how fast it can be, as `adtrain devices` shows them."""

from __future__ import annotations

from typing import Any

import pycuda
import pycuda.driver as cuda

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.device import Device


def properties(device: Device) -> dict[str, Any]:
    """Sizes in bytes, clocks in MHz, versions as text."""
    about, attribute = device.device, cuda.device_attribute
    major, minor = about.compute_capability()

    def read(name: str) -> int:
        value: int = about.get_attribute(getattr(attribute, name))
        return value

    free, total = cuda.mem_get_info()
    return {
        "name": about.name(),
        "capability": f"{major}.{minor}",
        "multiprocessors": device.multiprocessors,
        "memory_bytes": total,
        "free_bytes": free,
        "shared_bytes_per_multiprocessor": read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        "registers_per_multiprocessor": read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        "l2_bytes": read("L2_CACHE_SIZE"),
        "clock_mhz": read("CLOCK_RATE") / 1000,
        "memory_clock_mhz": read("MEMORY_CLOCK_RATE") / 1000,
        "driver_cuda": _version(cuda.get_driver_version()),
        "pycuda": pycuda.VERSION_TEXT,
        "pycuda_cuda": ".".join(map(str, cuda.get_version()[:2])),
        "nvrtc": compiler.version(),
    }


def _version(number: int) -> str:
    """CUDA's number of a version: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
