"""How ranks exchange arrays between CPUs: over TCP or by MPI, and in memory that they share if they are on one host.

Over TCP the number of ranks is a power of two. Both exchanges take log2(ranks) rounds. In each a rank swaps bytes with
the rank whose number differs in one bit. This is recursive doubling for all-gather, and the hypercube's algorithm for
all-to-all (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import select
import socket
from abc import ABC, abstractmethod
from contextlib import closing, suppress
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import numpy as np

from adtrain.core.communicator import all_gathered, gathered_texts, using
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.distributed.rendezvous import Meeting, Peer, meet

MARK_BYTES = 16
WATCHDOG_SECONDS = 5.0
"""How long a rank waits after its partner is gone: the watchdog ends the job and reports the reason."""
MPI_ADVICE = "pip install 'adtrain[mpi]'"


class CountedRanks(ABC):
    """A communicator whose exchanges are counted.

    Attributes:
        entered, left: how many exchanges this rank has begun and ended, for the watchdog.
        shares_memory: whether all ranks are on one host, and `shared_memory` returns memory.
    """

    shares_memory: bool

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.entered = self.left = 0

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
        self.entered += 1
        self._all_gather(_bytes(send), _rows(receive, self.size))
        self.left += 1

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> None:
        self.entered += 1
        self._all_to_all(_rows(send, self.size), _rows(receive, self.size))
        self.left += 1

    @abstractmethod
    def _all_gather(self, send: np.ndarray, rows: np.ndarray) -> None:
        """`Communicator.all_gather` of bytes (n,) to a row (n,) for each rank."""

    @abstractmethod
    def _all_to_all(self, source: np.ndarray, rows: np.ndarray) -> None:
        """`Communicator.all_to_all` of rows of bytes, one for each rank."""

    def shared_memory(self, size: int) -> np.ndarray | None:
        """Zeros that all ranks read and write: uint8 (size,), from a page's start. All ranks call this method.

        Returns None on all ranks if one of them cannot open the memory: it is on another host, the system is not Linux,
        or the memory is not there.
        """
        handle, path, mark = -1, "", secrets.token_bytes(MARK_BYTES)
        if self.rank == 0 and hasattr(os, "memfd_create"):
            with suppress(OSError):
                handle = os.memfd_create("adtrain")  # without a name in a folder: nothing is left over
                os.posix_fallocate(handle, 0, size + MARK_BYTES)
                os.pwrite(handle, mark, size)
                path = f"/proc/{os.getpid()}/fd/{handle}"
        try:
            with using(self):
                path, expected = json.loads(gathered_texts(json.dumps([path, mark.hex()]))[0])
                memory = _opened(path, size, bytes.fromhex(expected)) if path else None
                opened = all_gathered(np.array(memory is not None)).all()
            return np.frombuffer(memory, np.uint8)[:size] if memory is not None and opened else None
        finally:
            if handle >= 0:
                os.close(handle)


def _opened(path: str, size: int, mark: bytes) -> mmap.mmap | None:
    """The memory of rank 0; None if the path does not lead to it, as on another host."""
    with suppress(OSError, ValueError), Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size + MARK_BYTES)
        if memory[size:] == mark:
            return memory
    return None


class TcpCommunicator(CountedRanks):
    """The ranks that come to a meeting.

    Raises:
        AdtrainError: the number of ranks is not a power of two, or some do not come in time.
    """

    def __init__(self, where: Meeting, rank: int, size: int, timeout: float) -> None:
        if size & (size - 1):
            raise AdtrainError(f"found {size} ranks, expected a power of two: --ranks, or the launched processes")
        super().__init__(rank, size)
        listener, peers = meet(where, rank, size, timeout)
        with closing(listener):
            self.links = _connected(listener, peers, where, rank, timeout)
        self.shares_memory = self.shared_memory(1) is not None

    def close(self) -> None:
        for link in self.links.values():
            link.connection.close()

    def _all_gather(self, send: np.ndarray, rows: np.ndarray) -> None:
        rows[self.rank] = send
        for bit, link in self.links.items():
            own, other = self.rank // bit * bit, (self.rank ^ bit) // bit * bit
            link.swap(rows[own : own + bit], rows[other : other + bit])

    def _all_to_all(self, source: np.ndarray, rows: np.ndarray) -> None:
        """After a round with bit b, row j has what a rank that agrees with j in b and the bits above has sent."""
        for bit, link in reversed(self.links.items()):
            mine = 1 if self.rank & bit else 0
            source_blocks, blocks = (x.reshape(self.size // (2 * bit), 2, bit, x.shape[1]) for x in (source, rows))
            if source is not rows:
                blocks[:, mine] = source_blocks[:, mine]
            sent = source_blocks[:, 1 - mine]
            sent = sent.copy() if source is rows else np.ascontiguousarray(sent)
            received = blocks[:, 1 - mine] if len(blocks) == 1 else np.empty_like(sent)
            link.swap(sent, received)
            if len(blocks) > 1:
                blocks[:, 1 - mine] = received
            source = rows


class _Link:
    """The connection to one other rank."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection, self.peer = connection, peer
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.poll = select.poll()

    def swap(self, send: np.ndarray, receive: np.ndarray) -> None:
        """Send and receive at the same time. Raises DeviceError: the other rank is gone."""
        try:
            self._swap(_bytes(send).data, _bytes(receive).data)
        except OSError:
            sleep(WATCHDOG_SECONDS)
            raise DeviceError(f"the connection to {self.peer} is lost") from None

    def _swap(self, send: memoryview, receive: memoryview) -> None:
        while len(send) or len(receive):
            self.poll.register(
                self.connection, (select.POLLOUT if len(send) else 0) | (select.POLLIN if len(receive) else 0)
            )
            ready = self.poll.poll()[0][1]
            if len(send) and ready & select.POLLOUT:
                send = send[self.connection.send(send) :]
            elif len(receive):
                count = self.connection.recv_into(receive)
                if not count:
                    raise ConnectionResetError
                receive = receive[count:]
            else:
                raise ConnectionResetError


def _connected(
    listener: socket.socket, peers: list[Peer], where: Meeting, rank: int, timeout: float
) -> dict[int, _Link]:
    """The links of a rank. The key is the bit in which the other rank's number differs.

    The higher of two ranks connects, and first sends its number.
    """
    bits = [1 << i for i in range((len(peers) - 1).bit_length())]
    proof, connections = where.proof("links").encode(), dict[int, socket.socket]()
    try:
        for bit in filter(rank.__and__, bits):
            peer = peers[rank ^ bit]
            connections[bit] = socket.create_connection((peer.address, peer.port), timeout=timeout)
            connections[bit].sendall(proof + rank.to_bytes(4, "big"))
        listener.settimeout(timeout)
        while len(connections) < len(bits):
            connection, _ = listener.accept()
            connection.settimeout(timeout)
            greeting = b""
            while len(greeting) < len(proof) + 4 and (part := connection.recv(len(proof) + 4 - len(greeting))):
                greeting += part
            if greeting[:-4] == proof:
                connections[int.from_bytes(greeting[-4:], "big") ^ rank] = connection
            else:
                connection.close()
        return {bit: _Link(connections[bit], f"rank {rank ^ bit} on {peers[rank ^ bit].name}") for bit in bits}
    except OSError as error:
        raise AdtrainError(f"rank {rank} cannot connect to the others: {error.strerror or error}") from None


def _rows(x: np.ndarray, count: int) -> np.ndarray:
    """The memory of an array as bytes, (count, bytes of an item)."""
    return x.reshape(-1).view(np.uint8).reshape(count, -1)


def _bytes(x: np.ndarray) -> np.ndarray:
    """The memory of an array, as bytes."""
    return x.reshape(-1).view(np.uint8)


class MpiCommunicator(CountedRanks):
    """The ranks of MPI_COMM_WORLD."""

    def __init__(self) -> None:
        self.module = mpi()
        if not self.module.Is_initialized():
            _call(self.module, "MPI_Init_thread", None, None, self.module.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        self.world: Any = self.module.COMM_WORLD
        super().__init__(self.world.Get_rank(), self.world.Get_size())
        self.shares_memory = self.shared_memory(1) is not None

    def close(self) -> None:
        """End MPI. It waits for the other ranks."""
        if not self.module.Is_finalized():
            _call(self.module, "MPI_Finalize")

    def _all_gather(self, send: np.ndarray, rows: np.ndarray) -> None:
        self.world.Allgather(send, _bytes(rows))

    def _all_to_all(self, source: np.ndarray, rows: np.ndarray) -> None:
        self.world.Alltoall(_bytes(source), _bytes(rows))


def mpi() -> ModuleType:
    """The module mpi4py.MPI. MPI is not started.

    Raises:
        AdtrainError: mpi4py or an MPI library is not installed.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise AdtrainError(f"MPI needs mpi4py and an MPI library: {MPI_ADVICE} ({reason})") from None
    module: ModuleType = MPI
    return module


def version() -> str:
    """The MPI library and mpi4py, with their versions. MPI is not started. Raises AdtrainError as `mpi` does."""
    module = mpi()
    import mpi4py

    name, numbers = module.get_vendor()
    return f"{name} {'.'.join(map(str, numbers))}, mpi4py {mpi4py.__version__}"


def _call(module: ModuleType, name: str, *arguments: Any) -> None:
    """Call a function of MPI that waits for all ranks.

    mpi4py holds Python's global lock during these functions, so that no other thread could end a process that waits.
    """
    assert module.__file__ is not None
    if status := getattr(ctypes.CDLL(module.__file__), name)(*arguments):
        raise AdtrainError(f"{name} has failed with the status {status}")
