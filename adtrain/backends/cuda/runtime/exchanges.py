"""Exchanges between the GPUs of ranks, on a stream of their own, so that kernels run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda.runtime.copy_engines import MIN_BYTES, CopyEngines
from adtrain.backends.cuda.runtime.device import NON_BLOCKING, Device
from adtrain.backends.cuda.runtime.errors import checked, translated
from adtrain.backends.cuda.runtime.graph import order
from adtrain.core import communicator
from adtrain.core.backend import KernelRun
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation
from adtrain.passes.places import nbytes

REPEATS = 20
"""Exchanges of one measurement."""


class Transport(Protocol):
    """Moves bytes between the GPUs of ranks, such as NCCL.

    Attributes:
        name: for messages.
        max_bytes: the largest item for which it is considered; None: no limit.
    """

    name: str
    max_bytes: int | None

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        """Enqueue "all_gather" or "all_to_all" on a stream.

        Args:
            sent: address of what this rank sends.
            received: address of what it receives, `size` bytes from each rank.
            size: bytes of the item for one rank.
        """
        ...


class Exchanges:
    """The stream of exchanges, and their transports.

    All ranks create it, and ask for transports, in the same order.

    Args:
        transports: of two that are equally fast the first is used.
        copies: for long items, in memory that the peers can map.
    """

    @translated()
    def __init__(self, device: Device, transports: Sequence[Transport], copies: CopyEngines | None = None) -> None:
        self.device, self.transports, self.copies = device, transports, copies
        self.main = driver.CUstream(device.stream.handle)
        self.side = cuda.Stream(NON_BLOCKING)
        self.stream = driver.CUstream(self.side.handle)
        self.known: dict[tuple[str, int], Transport] = {}
        for transport in transports:  # NCCL connects in the first exchange of each kind, which must not be captured
            for name in ("all_gather", "all_to_all"):
                self._seconds(transport, name, 64, 1)

    def transport(self, name: str, size: int, memory: Any = None, memory_bytes: int = 0) -> Transport:
        """The copy engines for a long item, or the fastest transport for an exchange, by the times of rank 0.

        Args:
            memory: the memory, from `Device.reserve`, in which the item lies; None if it lies elsewhere.
        """
        long = memory is not None and size >= MIN_BYTES
        if long and self.copies is not None and self.copies.map(memory, memory_bytes):
            return self.copies
        found = self.known.get((name, size))
        if found is None:
            possible = [x for x in self.transports if x.max_bytes is None or size <= x.max_bytes]
            seconds = [self._seconds(x, name, size, REPEATS) for x in possible] if len(possible) > 1 else [0.0]
            chosen = communicator.all_gathered(np.argmin(seconds).reshape(1))[0, 0]
            found = self.known[name, size] = possible[chosen]
        return found

    @translated()
    def _seconds(self, transport: Transport, name: str, size: int, repeats: int) -> float:
        """The time of an exchange outside of a graph, after `repeats` exchanges that are not measured."""
        total = size * communicator.current().size
        memory = self.device.allocate(2 * total)
        start, end = cuda.Event(), cuda.Event()
        self.fork()  # work of the main stream may still use the memory, which its pool gives to later work
        for number in range(2 * repeats):
            if number == repeats:
                start.record(self.side)
            transport.enqueue(name, int(memory), int(memory) + total, size, self.side)
        end.record(self.side)
        end.synchronize()
        return float(start.time_till(end)) / 1e3 / repeats

    def fork(self) -> None:
        """The exchange stream waits for the work that is on the main stream."""
        order(self.main, self.stream)

    def join(self, event: Any) -> None:
        """The main stream waits for the exchange that `event` follows."""
        checked(driver.cuStreamWaitEvent(self.main, event, 0))
        checked(driver.cuEventDestroy(event))

    def mark(self) -> Any:
        """An event after the last exchange."""
        event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        checked(driver.cuEventRecord(event, self.stream))
        return event


class ExchangeWork:
    """An exchange as the work of an equation; see `Runnable`.

    Args:
        memory: the memory, from `Device.reserve`, in which the argument lies; None if it lies elsewhere.
    """

    scratch, checked = 0, False

    def __init__(self, exchanges: Exchanges, equation: Equation, memory: Any = None, memory_bytes: int = 0) -> None:
        assert equation.has(Trait.COLLECTIVE)
        self.exchanges, self.name = exchanges, equation.name
        received = nbytes(equation.outputs[0])
        self.size = received // communicator.current().size
        self.transport = exchanges.transport(self.name, self.size, memory, memory_bytes)
        self.kernels = [KernelRun(f"{self.transport.name} {self.name}", {"bytes": received})]

    def start(self, addresses: Sequence[int]) -> Any:
        """Enqueue the exchange after the work on the main stream; returns the event for `join`."""
        self.exchanges.fork()
        self.transport.enqueue(self.name, addresses[0], addresses[1], self.size, self.exchanges.side)
        return self.exchanges.mark()
