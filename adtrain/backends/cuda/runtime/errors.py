"""Errors of the CUDA driver as DeviceError, DeviceFault and OutOfMemory, in one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.core.errors import DeviceError, DeviceFault, OutOfMemory
from adtrain.text import mebibytes


def checked(answer: tuple[Any, ...]) -> Any:
    """The results of a call of the driver API by cuda-bindings.

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
    """Translates errors of PyCUDA; a context manager, or a decorator.

    Raises:
        DeviceFault: a kernel failed, now or earlier. This process cannot use the device any more.
        DeviceError: any other error.
    """
    try:
        yield
    except cuda.Error as error:
        raise _failure(str(error).partition(":")[2].strip() or str(error)) from None


@translated()
def out_of_memory(needed: int) -> OutOfMemory:
    """The error of an allocation of ``needed`` bytes."""
    free, total = cuda.mem_get_info()
    sizes = f"{mebibytes(needed)} more needed, {mebibytes(free)} of {mebibytes(total)} free"
    return OutOfMemory(f"device gpu: out of memory: {sizes}")


FAULTS = ("illegal", "misaligned", "launch failed", "launch timed out", "hardware", "assert", "invalid program", "trap")
"""Words in the names of errors after which the context cannot be used."""


def _failure(text: str) -> DeviceError:
    if any(fault in text for fault in FAULTS):
        return DeviceFault(f"device gpu: a kernel failed: {text}; run compute-sanitizer on this command to find it")
    return DeviceError(f"device gpu: {text}")
