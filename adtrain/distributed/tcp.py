"""Exchanges over TCP, without MPI.

The number of ranks is a power of two. Both exchanges take log2(ranks) rounds. In each a rank swaps bytes with the rank
whose number differs in one bit. This is recursive doubling for all-gather, and the hypercube's algorithm for all-to-all
(R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005).
"""

from __future__ import annotations

import select
import socket
from contextlib import closing
from time import sleep

import numpy as np

from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.distributed.rendezvous import Meeting, Peer, meet
from adtrain.distributed.shared_memory import common_memory

WATCHDOG_SECONDS = 5.0
"""How long a rank waits after its partner is gone: the watchdog ends the job and reports the reason."""


class TcpCommunicator:
    """The ranks that come to a meeting.

    Attributes:
        entered, left: how many exchanges this rank has begun and ended, for the watchdog.

    Raises:
        AdtrainError: the number of ranks is not a power of two, or some do not come in time.
    """

    def __init__(self, where: Meeting, rank: int, size: int, timeout: float) -> None:
        if size & (size - 1):
            raise AdtrainError(f"found {size} ranks, expected a power of two: --ranks, or the launched processes")
        self.rank, self.size = rank, size
        self.entered = self.left = 0
        listener, peers = meet(where, rank, size, timeout)
        with closing(listener):
            self.links = _connected(listener, peers, where, rank, timeout)
        self.shares_memory = self.shared_memory(1) is not None

    def close(self) -> None:
        for link in self.links.values():
            link.connection.close()

    def shared_memory(self, size: int) -> np.ndarray | None:
        return common_memory(self, size)

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
        self.entered += 1
        rows = _rows(receive, self.size)
        rows[self.rank] = _bytes(send)
        for bit, link in self.links.items():
            own, other = self.rank // bit * bit, (self.rank ^ bit) // bit * bit
            link.swap(rows[own : own + bit], rows[other : other + bit])
        self.left += 1

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> None:
        """After a round with bit b, row j has what a rank that agrees with j in b and the bits above has sent."""
        self.entered += 1
        rows, source = _rows(receive, self.size), _rows(send, self.size)
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
        self.left += 1


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
