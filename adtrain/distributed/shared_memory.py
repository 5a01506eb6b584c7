"""Memory that two ranks of a host share, so that bytes between them are copied twice and use no socket.

Each side writes into its own memory and sends a byte over the connection. When it has received the other's byte, it
reads the other's memory. The memory has two halves, used in turn: the byte for one half also says that its sender has
read the half before.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np

HALF_BYTES = 2 << 20
MARK_BYTES = 16


class SharedMemory:
    """This rank's memory, `own`, and the other's, `other`: uint8 (2, HALF_BYTES)."""

    def __init__(self, own: mmap.mmap, other: mmap.mmap) -> None:
        self.own, self.other = (np.frombuffer(x, np.uint8).reshape(2, HALF_BYTES) for x in (own, other))


def shared(connection: socket.socket) -> SharedMemory | None:
    """Memory shared with the process at the other end of a blocking connection, which calls this function too.

    None if they are not on one host, or the system is not Linux. Both sides get the same answer.
    """
    mark, handle, own = secrets.token_bytes(MARK_BYTES), -1, None
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            handle = os.memfd_create("adtrain")  # without a name in a folder: nothing is left over
            os.ftruncate(handle, 2 * HALF_BYTES)
            own = mmap.mmap(handle, 2 * HALF_BYTES)
            own[:MARK_BYTES] = mark
    try:
        path, expected = _swapped(connection, [f"/proc/{os.getpid()}/fd/{handle}", mark.hex()])
        other = _opened(path, bytes.fromhex(expected)) if own is not None else None
        (opened,) = _swapped(connection, [other is not None])
        return SharedMemory(own, other) if own is not None and other is not None and opened else None
    finally:
        if handle >= 0:
            os.close(handle)


def _opened(path: str, mark: bytes) -> mmap.mmap | None:
    """The other's memory; None if the path does not lead to it, as on another host."""
    with suppress(OSError, ValueError), Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 2 * HALF_BYTES)
        if memory[:MARK_BYTES] == mark:
            return memory
    return None


def _swapped(connection: socket.socket, message: list[object]) -> list[str]:
    """Send a message to the other side, and return its message."""
    connection.sendall(json.dumps(message).encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):  # a byte at a time: nothing after the line is read
        part = connection.recv(1)
        if not part:
            raise ConnectionResetError
        line += part
    answer: list[str] = json.loads(line)
    return answer
