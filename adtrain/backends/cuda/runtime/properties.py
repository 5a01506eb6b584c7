"""The properties of the GPUs and the versions of their software, as `adtrain devices` shows them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import pycuda
import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.runtime import libraries
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import checked, translated
from adtrain.backends.cuda.vendor import Library


@translated()
def properties(device: Device, candidates: Sequence[Library]) -> dict[str, Any]:
    """Sizes in bytes, clocks in MHz, and versions as text, None where something is missing.

    ``devices`` has an entry for each GPU of the machine, ``device`` first; ``peers`` of an entry are the numbers of the
    GPUs whose memory it can read directly. ``candidates`` names the libraries whose calls are candidates.
    """
    count = cuda.Device.count()
    found = [{**_describe(cuda.Device(ordinal)), "peers": peers(ordinal, count)} for ordinal in range(count)]
    found[0]["free_bytes"], _ = cuda.mem_get_info()
    return {
        "devices": found,
        "driver": libraries.driver(),
        "driver_cuda": libraries.cuda_version(cuda.get_driver_version()),
        "runtime": libraries.runtime(),
        "toolkit": _toolkit(),
        "pycuda": pycuda.VERSION_TEXT,
        "pycuda_cuda": ".".join(map(str, cuda.get_version()[:2])),
        "nvrtc": compiler.version(),
        "libraries": libraries.vendor(),
        "candidates": [library.name for library in candidates],
    }


@translated()
def identity(device: Device) -> str:
    """The names of the GPU and its driver."""
    major, minor = device.device.compute_capability()
    driver = libraries.driver() or libraries.cuda_version(cuda.get_driver_version())
    return f"{device.device.name()}, compute capability {major}.{minor}, driver {driver}"


@translated()
def _describe(about: Any) -> dict[str, Any]:
    """One GPU; ``free_bytes`` is known only for the one in use."""
    major, minor = about.compute_capability()

    read, attribute = about.get_attribute, cuda.device_attribute
    return {
        "name": about.name(),
        "capability": f"{major}.{minor}",
        "multiprocessors": read(attribute.MULTIPROCESSOR_COUNT),
        "memory_bytes": about.total_memory(),
        "free_bytes": None,
        "shared_bytes_per_multiprocessor": read(attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        "registers_per_multiprocessor": read(attribute.MAX_REGISTERS_PER_MULTIPROCESSOR),
        "l2_bytes": read(attribute.L2_CACHE_SIZE),
        "clock_mhz": read(attribute.CLOCK_RATE) / 1000,
        "memory_clock_mhz": read(attribute.MEMORY_CLOCK_RATE) / 1000,
    }


def peers(ordinal: int, count: int) -> list[int]:
    """The GPUs, of `count`, whose memory GPU `ordinal` can read directly, through NVLink or PCIe."""
    devices = [checked(driver.cuDeviceGet(i)) for i in range(count)]
    able = [i != ordinal and checked(driver.cuDeviceCanAccessPeer(devices[ordinal], x)) for i, x in enumerate(devices)]
    return [i for i, x in enumerate(able) if x]


def _toolkit() -> str | None:
    """The version of the CUDA toolkit whose nvcc is on the PATH, "13.0"."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    output = subprocess.run(
        [nvcc, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    version = re.search(r"release ([\d.]+)", output)
    return version[1] if version else None
