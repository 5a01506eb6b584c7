"""What the driver reports, as errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.core.errors import DeviceError, DeviceFault, OutOfMemory


def checked(answer: tuple[Any, ...]) -> Any:
    """The results of a call of the driver's API.

    Raises:
        DeviceError: it failed.
    """
    error, *results = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise _failure(error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower())
    if not results:
        return None
    return results[0] if len(results) == 1 else results


@contextmanager
def translated() -> Iterator[None]:
    """Errors of PyCUDA in this block as ours.

    Raises:
        DeviceFault: a kernel failed, now or earlier; the device can do nothing more for this process.
        DeviceError: anything else.
    """
    try:
        yield
    except cuda.Error as error:
        raise _failure(str(error).partition(":")[2].strip() or str(error)) from None


def out_of_memory(needed: int) -> OutOfMemory:
    """The error of a request for so many bytes."""
    free, total = cuda.mem_get_info()
    return OutOfMemory(f"device gpu: out of memory: {mib(needed)} more needed, {mib(free)} of {mib(total)} free")


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


FAULTS = ("illegal", "misaligned", "launch failed", "launch timed out", "hardware", "assert", "invalid program", "trap")
"""What is in the names of errors after which a context is of no use."""


def _failure(text: str) -> DeviceError:
    if any(fault in text for fault in FAULTS):
        return DeviceFault(f"device gpu: a kernel failed: {text}; run compute-sanitizer on this command to find it")
    return DeviceError(f"device gpu: {text}")
