"""Long exchanges between GPUs of one host by their copy engines, so that kernels keep all multiprocessors."""

from __future__ import annotations

from typing import Any

import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda.copy_exchange import Copy, Write, own_copy, steps
from adtrain.backends.cuda.runtime.device import NON_BLOCKING
from adtrain.backends.cuda.runtime.errors import checked, translated
from adtrain.backends.cuda.runtime.graph import order
from adtrain.backends.cuda.runtime.peer_memory import PeerMemory, mapped_by_all

MIN_BYTES = 4 << 20
"""Shorter items use other transports. The size from which on copy engines are faster was not measured."""


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
