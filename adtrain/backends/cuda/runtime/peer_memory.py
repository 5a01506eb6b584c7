"""Exchanges between GPUs of one host by kernels that read the memory of the other GPUs (CUDA IPC, NVLink or PCIe)."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import numpy as np
import pycuda.driver as cuda

from adtrain.backends.cuda.compiler import file_source
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import translated
from adtrain.core import communicator

THREADS = 512
"""Threads of a block (BLOCK_THREADS in peer_exchange.cu)."""
BLOCKS = 128
"""Maximum blocks of an exchange."""
CHUNK = 16 << 10
"""Bytes that a block reads from a peer at a time."""
MAX_ROUNDS = 8
"""Maximum rounds of an exchange: in a round each block moves a chunk. Longer exchanges use NCCL without measuring."""


class PeerMemory:
    """A `Transport` through windows, which all ranks have mapped: kernels/cuda/index/peer_exchange.cu."""

    name: str = "peer memory"
    max_bytes: int | None = MAX_ROUNDS * BLOCKS * CHUNK

    def __init__(self, device: Device, own: Any, windows: list[Any]) -> None:
        self.own, self.windows = own, windows
        ranks = communicator.current()
        self.rank, count = ranks.rank, ranks.size
        macros = {
            "RANKS": count,
            "BLOCK_THREADS": THREADS,
            "BLOCKS": BLOCKS,
            "CHUNK": CHUNK,
            "FLAGS_AT": _flags_at(count),
        }
        source = file_source("index/peer_exchange.cu", (), tuple(macros.items()))
        self.function = device.kernel(source, "peer_exchange").function
        self.function.arg_format = "PP" + "P" * count + "qqq"
        self.function.texrefs = ()  # `prepared_async_call` reads it

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        blocks = max(1, min(BLOCKS, -(-size // CHUNK)))
        arguments = (sent, received, *map(int, self.windows), self.rank, size, name == "all_gather")
        with translated():
            self.function.prepared_async_call((blocks, 1, 1), (THREADS, 1, 1), stream, *arguments)


def connected(device: Device) -> PeerMemory | None:
    """Map the windows of all ranks; None if a GPU cannot map another's. All ranks call it at the same time."""
    ranks = communicator.current()
    size = _flags_at(ranks.size) + 4 * ranks.size * BLOCKS
    own = device.reserve(size)
    with translated():
        cuda.memset_d8(int(own), 0, size)
        cuda.Context.synchronize()  # before a peer sets a flag
    handle = np.zeros(0, np.uint8)
    with suppress(cuda.Error):
        handle = np.frombuffer(bytes(cuda.mem_get_ipc_handle(int(own))), np.uint8)
    hosts = communicator.gathered_texts(f"{socket.gethostname()} {len(handle)}")
    if len(set(hosts)) > 1 or not len(handle):
        return None
    windows: list[Any] = []
    with suppress(cuda.Error):
        for rank, each in enumerate(communicator.all_gathered(handle)):
            windows.append(own if rank == ranks.rank else cuda.IPCMemoryHandle(bytearray(each.tobytes())))
    if not communicator.all_gathered(np.array([len(windows) == ranks.size])).all():
        return None
    return PeerMemory(device, own, windows)


def _flags_at(ranks: int) -> int:
    """The offset of the flags in a window, in bytes. Before them are the chunks: two for each block and rank."""
    return 2 * BLOCKS * ranks * CHUNK
