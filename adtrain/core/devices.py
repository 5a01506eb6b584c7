"""The backends by the names of their devices, each created at its first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from adtrain.core.errors import DeviceError
from adtrain.core.timeline import during, report_status


class Transfers(Protocol):
    """Copies between host and device, and memory shared with other packages.

    Only the device's backend knows what its buffers are; they have a shape and a dtype.
    """

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack's type and number of the device."""
        ...

    def to_dlpack(self, buffer: Any, **options: Any) -> Any:
        """A DLPack capsule of the buffer; ``options`` are those of `__dlpack__`."""
        ...

    def from_dlpack(self, x: Any) -> Any:
        """A buffer in the memory of another package's array on this device."""
        ...

    def from_numpy(self, elements: np.ndarray, donated: Sequence[Any] = ()) -> Any:
        """A buffer with the elements of a C-contiguous host array, which must not be written to afterwards.

        ``donated`` is empty, or has one buffer whose memory may be used if nothing else refers to it.
        """
        ...

    def to_numpy(self, buffer: Any) -> np.ndarray:
        """The elements as a read-only, C-contiguous host array."""
        ...

    def fetch(self, buffer: Any) -> Callable[[], np.ndarray]:
        """Start a copy to the host, in order with the device's other work; the function returned waits for it.

        The elements of a GPU are in page-locked memory, which is free for another copy when they are given up.
        """
        ...


LOADERS = "adtrain.backends"
"""The package with the functions that create the backends, by device; nothing in `core` imports it by itself."""

_loaded: dict[str, Transfers] = {}


def find_device(device: str) -> Transfers:
    """The backend of ``device``, created at first use.

    Raises:
        DeviceError: the device is not available.
    """
    found = _loaded.get(device) if isinstance(device, str) else None
    if found is None:
        loaders: dict[str, Callable[[], Transfers]] = import_module(LOADERS).LOADERS
        if device not in sorted(loaders):
            raise DeviceError(f"device {device!r} is not available; this version runs on: {', '.join(sorted(loaders))}")
        report_status(f"starting the {device}")
        with during("device"):
            found = _loaded[device] = loaders[device]()
    return found
