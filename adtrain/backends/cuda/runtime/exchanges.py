"""Exchanges between the GPUs of ranks, on a stream of their own, so that kernels run at the same time.

There are three transports: NCCL, through the raw layer of NVIDIA's binding nccl4py, which takes addresses and stream
handles as integers; kernels that read the memory of the other GPUs of a host (CUDA IPC, NVLink or PCIe); and the copy
engines of these GPUs, so that kernels keep all multiprocessors.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda.compiler import file_source
from adtrain.backends.cuda.launch_plan import WorkSize
from adtrain.backends.cuda.peer_window import (
    BLOCKS,
    CHUNK,
    EMPTY,
    THREADS,
    Copy,
    Write,
    macros,
    own_copy,
    slots_of_vectors,
    steps,
    window_bytes,
)
from adtrain.backends.cuda.runtime import libraries
from adtrain.backends.cuda.runtime.device import NON_BLOCKING, Device
from adtrain.backends.cuda.runtime.driver import Shape, ShapedLaunch, checked, translated
from adtrain.backends.cuda.runtime.launch import order
from adtrain.core import communicator
from adtrain.core.backend import KernelRun
from adtrain.core.errors import DeviceError
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation

REPEATS = 20
"""Exchanges of one measurement."""
UINT8 = 1
"""ncclUint8 of `ncclDataType_t`."""
MAX_ROUNDS = 8
"""Maximum rounds of an exchange by `PeerMemory`: in a round each block moves a chunk. Longer exchanges use NCCL without
measuring."""
MIN_BYTES = 4 << 20
"""The shortest items of copy engines. The size from which on they are faster was not measured."""


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


class Nccl:
    """The NCCL communicator of this rank. All ranks make it at the same time. A `Transport`.

    Raises:
        DeviceError: nccl4py or NCCL is missing, or the ranks cannot connect.
    """

    name: str = "NCCL"
    max_bytes: int | None = None

    def __init__(self) -> None:
        self.library = libraries.nccl()
        ranks = communicator.current()
        identifier = self.library.get_unique_id() if ranks.rank == 0 else self.library.UniqueId()
        everywhere = communicator.all_gathered(np.frombuffer(bytes(identifier), np.uint8))
        identifier = self.library.UniqueId.from_buffer(everywhere[0].tobytes())
        try:
            self.comm = self.library.comm_init_rank(ranks.size, identifier, ranks.rank)
        except Exception as error:  # the binding's own class
            raise DeviceError(f"NCCL cannot connect {ranks.size} ranks: {error}") from None

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        method = self.library.all_gather if name == "all_gather" else self.library.allto_all
        method(sent, received, size, UINT8, self.comm, stream.handle)


class PeerMemory:
    """A `Transport` through windows, which all ranks have mapped: kernels/cuda/index/peer_exchange.cu."""

    name: str = "peer memory"
    max_bytes: int | None = MAX_ROUNDS * BLOCKS * CHUNK

    def __init__(self, device: Device, windows: list[Any]) -> None:
        self.windows = windows
        ranks = communicator.current()
        source = file_source("index/peer_exchange.cu", (), tuple(macros(ranks.size).items()))
        one_block = WorkSize(blocks=(1, 1, 1), threads=THREADS)
        self.kernel = device.kernel(source, "peer_exchange", "PP" + "P" * ranks.size + "qqq", one_block)
        device.windows = (*map(int, windows), ranks.rank)
        # At most one for each multiprocessor of every rank: blocks wait for those of the peers, so all run at once.
        self.blocks = min(BLOCKS, int(communicator.all_gathered(np.array([device.target.multiprocessors])).min()))
        self.device = device

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        blocks = max(1, min(self.blocks, -(-size // CHUNK)))
        launch = ShapedLaunch(self.kernel, Shape((blocks, 1, 1), (THREADS, 1, 1), 0))
        launch(stream, (sent, received, *self.device.windows, size, name == "all_gather"))


def connected(device: Device) -> PeerMemory | None:
    """Map the windows of all ranks; None if a GPU cannot map another's. All ranks call it at the same time."""
    size = window_bytes(communicator.current().size)
    own = device.reserve(size)
    with translated():
        cuda.memset_d8(int(own), 0, size)
        slots, end = slots_of_vectors(communicator.current().size)
        cuda.memset_d8(int(own) + slots, EMPTY, end - slots)
        cuda.Context.synchronize()  # before a peer sets a flag
    windows = mapped_by_all(own)
    return None if windows is None else PeerMemory(device, windows)


def mapped_by_all(own: Any) -> list[Any] | None:
    """Map memory of each rank. Returns None if a GPU cannot map the memory of another one.

    All ranks call it at the same time. `own`, of this rank, comes from `Device.reserve`.
    """
    ranks = communicator.current()
    handle = np.zeros(0, np.uint8)
    with suppress(cuda.Error):
        handle = np.frombuffer(bytes(cuda.mem_get_ipc_handle(int(own))), np.uint8)
    hosts = communicator.gathered_texts(f"{socket.gethostname()} {len(handle)}")
    if len(set(hosts)) > 1 or not len(handle):
        return None
    found: list[Any] = []
    with suppress(cuda.Error):
        for rank, each in enumerate(communicator.all_gathered(handle)):
            found.append(own if rank == ranks.rank else cuda.IPCMemoryHandle(bytearray(each.tobytes())))
    return found if communicator.all_gathered(np.array([len(found) == ranks.size])).all() else None


class CopyEngines:
    """A `Transport` for items in memory that all ranks have mapped. Exchanges run one after another.

    Attributes:
        windows: the window of each rank, as this rank has mapped it.
        beside: the stream of the copy from this rank to itself.
        mapped: by address, memory of this rank, its size, and the same memory of each rank as this rank has mapped it.
    """

    name: str = "copy engines"
    max_bytes: int | None = None

    @translated()
    def __init__(self, peers: PeerMemory) -> None:
        *self.windows, self.rank = peers.device.windows
        self.beside = cuda.Stream(NON_BLOCKING)
        self.mapped: dict[int, tuple[Any, int, list[Any]]] = {}

    def map(self, memory: Any, size: int) -> bool:
        """Let the peers read memory that `Device.reserve` returned. All ranks call it at the same time.

        The memory is kept until the process ends: it must not be freed while a peer has mapped it. Returns False if a
        GPU cannot map it.
        """
        if int(memory) in self.mapped:
            return True
        views = mapped_by_all(memory)
        if views is not None:
            self.mapped[int(memory)] = memory, size, views
        return views is not None

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        """See `Transport`. Flags are stream memory operations, which a CUDA graph can contain."""
        on, beside = driver.CUstream(stream.handle), driver.CUstream(self.beside.handle)
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        order(on, beside)
        checked(driver.cuMemcpyDtoDAsync(*own_copy(name, sent, received, size, self.rank), beside))
        for step in steps(name, self._views(sent), received, size, self.windows, self.rank):
            if isinstance(step, Copy):
                checked(driver.cuMemcpyDtoDAsync(*step, on))
            elif isinstance(step, Write):
                checked(driver.cuStreamWriteValue32(on, *step, 0))
            else:
                checked(driver.cuStreamWaitValue32(on, step.address, 1, equal))
        order(beside, on)

    def _views(self, address: int) -> list[int]:
        """For each rank, where this rank has mapped the memory that corresponds to its own `address`."""
        start, views = next((a, v) for a, (_, size, v) in self.mapped.items() if a <= address < a + size)
        return [int(view) + address - start for view in views]


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

    def mark(self) -> Callable[[], None]:
        """Mark the end of the last exchange. The function that is returned lets the main stream wait for it."""
        event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        checked(driver.cuEventRecord(event, self.stream))
        return partial(self._join, event)

    def _join(self, event: Any) -> None:
        checked(driver.cuStreamWaitEvent(self.main, event, 0))
        checked(driver.cuEventDestroy(event))


class ExchangeWork:
    """An exchange as the work of an equation; see `Runnable`.

    Args:
        memory: the memory, from `Device.reserve`, in which the argument lies; None if it lies elsewhere.
    """

    checked = False

    def __init__(self, exchanges: Exchanges, equation: Equation, memory: Any = None, memory_bytes: int = 0) -> None:
        assert equation.has(Trait.COLLECTIVE)
        self.exchanges, self.name = exchanges, equation.name
        received = equation.outputs[0].nbytes
        self.size = received // communicator.current().size
        self.transport = exchanges.transport(self.name, self.size, memory, memory_bytes)
        self.kernels = [KernelRun(f"{self.transport.name} {self.name}", {"bytes": received})]

    def start(self, addresses: Sequence[int]) -> Callable[[], None]:
        """Enqueue the exchange after the work on the main stream. See `Exchanges.mark` for the result."""
        self.exchanges.fork()
        self.transport.enqueue(self.name, addresses[0], addresses[1], self.size, self.exchanges.side)
        return self.exchanges.mark()
