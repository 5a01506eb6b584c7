"""Memory that the GPU shares with other libraries by DLPack, and the streams that must wait for one another."""

from __future__ import annotations

from collections import deque
from typing import Any

from cuda.bindings import driver

from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.driver import checked, translated
from adtrain.backends.cuda.runtime.launch import order
from adtrain.core import dlpack
from adtrain.core.dlpack import Tensor
from adtrain.core.errors import DTypeError, ShapeError

ALIGNMENT = 256
"""Bytes that addresses of memory from the driver are multiples of, which kernels rely on."""

LEGACY_STREAM, PER_THREAD_STREAM, NO_WAIT = 1, 2, -1
"""Numbers that DLPack and the driver give to the default streams, and DLPack's "do not synchronize"."""


class Borrowed:
    """Memory of another library; `int()` is the address. Programs do not overwrite it."""

    def __init__(self, tensor: Tensor, exchange: DlpackExchange) -> None:
        self.tensor, self.exchange = tensor, exchange

    def __int__(self) -> int:
        return self.tensor.address

    def __del__(self) -> None:
        self.exchange.returned.append((self.tensor.owner, None))


class Lent:
    """Memory that another library reads on a stream, until it drops this object."""

    def __init__(self, memory: Any, stream: int, exchange: DlpackExchange) -> None:
        self.memory, self.stream, self.exchange = memory, stream, exchange

    def __del__(self) -> None:
        self.exchange.returned.append((self.memory, self.stream))


class DlpackExchange:
    """Lends memory of a device to other libraries, and borrows theirs.

    Memory can be dropped in any thread, also while a graph is captured, so dropping it calls no driver. `collect` does
    the rest before the next exchange or allocation.

    Attributes:
        returned: dropped memory, and the stream on which it was lent; None for borrowed memory.
        in_use: memory that the device's stream may still read, and the event after which it does not.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.returned: deque[tuple[object, int | None]] = deque()
        self.in_use: deque[tuple[object, Any]] = deque()

    def lend(self, memory: Any, stream: int | None) -> Lent:
        """Memory for a consumer whose work on ``stream`` waits for the device's work so far.

        Raises:
            BufferError: the stream is 0, which DLPack does not allow.
        """
        self.collect()
        if stream == 0:
            raise BufferError("__dlpack__: found stream 0, expected 1 or 2 for the default streams, or a handle")
        number = LEGACY_STREAM if stream is None else int(stream)
        if number == NO_WAIT:
            number = LEGACY_STREAM
        else:
            order(driver.CUstream(self.device.stream.handle), driver.CUstream(number))
        return Lent(memory, number, self)

    def borrow(self, x: Any) -> Tensor:
        """The tensor of another library, whose work the device's stream waits for.

        Raises:
            DTypeError: the library does not give it.
        """
        self.collect()
        stream = int(self.device.stream.handle)
        try:
            try:
                capsule = x.__dlpack__(stream=stream, max_version=dlpack.VERSION)
            except TypeError:  # a library of DLPack below 1.0
                capsule = x.__dlpack__(stream=stream)
        except (BufferError, RuntimeError, TypeError) as error:
            raise DTypeError(f"from_dlpack: {error}") from None
        tensor = dlpack.taken(capsule)
        if not tensor.in_c_order:
            found = f"found strides {tensor.strides} of shape {tensor.shape}"
            raise ShapeError(f"from_dlpack: {found}, expected C order; write x.contiguous() in PyTorch")
        return tensor

    @translated()
    def collect(self) -> None:
        """Let memory that was dropped be used again as soon as no stream reads it."""
        while self.returned:
            memory, stream = self.returned.popleft()
            if stream is None:
                self.in_use.append((memory, self.device.event()))
            elif stream in (LEGACY_STREAM, PER_THREAD_STREAM):
                order(driver.CUstream(stream), driver.CUstream(self.device.stream.handle))
            else:  # the stream may have been destroyed
                checked(driver.cuCtxSynchronize())
        while self.in_use and self.in_use[0][1].query():
            self.in_use.popleft()
