"""DLPack: arrays that share memory with other packages, without a copy (https://dmlc.github.io/dlpack)."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.errors import DeviceError, DTypeError

CPU = 1
"""DLPack's number of the CPU, kDLCPU."""


class _Writeable:
    """Read-only elements as NumPy gives them to consumers of DLPack below 1.0, which has no mark for read-only."""

    def __init__(self, elements: np.ndarray) -> None:
        self.elements = elements  # keeps the memory alive
        address, _ = elements.__array_interface__["data"]
        self.__array_interface__ = {**elements.__array_interface__, "data": (address, False)}


def exported(elements: np.ndarray, **options: Any) -> Any:
    """The capsule of host elements; ``options`` are those of `__dlpack__`."""
    options.pop("stream", None)
    if (options.get("max_version") or (0, 0)) < (1, 0):
        elements = np.asarray(_Writeable(elements))
    return elements.__dlpack__(**options)


def imported(x: Any) -> np.ndarray:
    """The elements of another package's array, read-only and C-contiguous, copied only to make them so.

    Raises:
        DTypeError: ``x`` has no ``__dlpack__``, or NumPy has no such dtype. DeviceError: it is not on the CPU.
    """
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise DTypeError(f"from_dlpack: found a {type(x).__name__}, expected an array with __dlpack__")
    if int(x.__dlpack_device__()[0]) != CPU:
        raise DeviceError("from_dlpack: found an array on another device, expected the CPU; copy it there first")
    try:
        elements = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        raise DTypeError(f"from_dlpack: {error}") from None
    contiguous: Any = np.ascontiguousarray(elements).reshape(elements.shape)
    return np.asarray(memoryview(contiguous).toreadonly())
