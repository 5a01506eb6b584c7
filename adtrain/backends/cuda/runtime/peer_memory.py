"""Exchanges between GPUs of one host by kernels that read the memory of the other GPUs (CUDA IPC, NVLink or PCIe)."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import numpy as np
import pycuda.driver as cuda

from adtrain.backends.cuda.compiler import file_source
from adtrain.backends.cuda.peer_window import BLOCKS, CHUNK, EMPTY, THREADS, macros, slots_of_vectors, window_bytes
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import translated
from adtrain.core import communicator

MAX_ROUNDS = 8
"""Maximum rounds of an exchange: in a round each block moves a chunk. Longer exchanges use NCCL without measuring."""


class PeerMemory:
    """A `Transport` through windows, which all ranks have mapped: kernels/cuda/index/peer_exchange.cu."""

    name: str = "peer memory"
    max_bytes: int | None = MAX_ROUNDS * BLOCKS * CHUNK

    def __init__(self, device: Device, windows: list[Any]) -> None:
        self.windows = windows
        ranks = communicator.current()
        source = file_source("index/peer_exchange.cu", (), tuple(macros(ranks.size).items()))
        self.function = device.kernel(source, "peer_exchange").function
        self.function.arg_format = "PP" + "P" * ranks.size + "qqq"
        self.function.texrefs = ()  # `prepared_async_call` reads it
        device.windows = (*map(int, windows), ranks.rank)
        # At most one for each multiprocessor of every rank: blocks wait for those of the peers, so all run at once.
        self.blocks = min(BLOCKS, int(communicator.all_gathered(np.array([device.target.multiprocessors])).min()))
        self.device = device

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        blocks = max(1, min(self.blocks, -(-size // CHUNK)))
        arguments = (sent, received, *self.device.windows, size, name == "all_gather")
        with translated():
            self.function.prepared_async_call((blocks, 1, 1), (THREADS, 1, 1), stream, *arguments)


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
