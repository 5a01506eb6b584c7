"""The table of devices: each device's name and the function that loads its backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from adtrain.core.errors import DeviceError


class Transfers(Protocol):
    """Copies between host and device. Buffers are the device's own objects; only its backend reads them."""

    def from_numpy(self, elements: np.ndarray) -> Any:
        """A buffer with the elements of a C-contiguous host array that nobody will write to."""
        ...

    def to_numpy(self, buffer: Any) -> np.ndarray:
        """The elements as a read-only, C-contiguous host array."""
        ...

    def fetch(self, buffer: Any) -> Callable[[], np.ndarray]:
        """`to_numpy` in two parts: the elements are on their way, behind what has been asked for so far and before
        what is asked for next; the function that is returned waits for them."""
        ...


_loaders: dict[str, Callable[[], Transfers]] = {}
_loaded: dict[str, Transfers] = {}


def register_device(device: str, loader: Callable[[], Transfers]) -> None:
    """Add ``device``; ``loader`` makes its backend at first use."""
    _loaders[device] = loader


def find_device(device: str) -> Transfers:
    """The backend of ``device``, loaded at first use.

    Raises:
        DeviceError: there is no such device here.
    """
    found = _loaded.get(device)
    if found is None:
        if device not in _loaders:
            raise DeviceError(
                f"device {device!r} is not available; this version runs on: {', '.join(sorted(_loaders))}"
            )
        found = _loaded[device] = _loaders[device]()
    return found
