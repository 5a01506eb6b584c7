"""Long exchanges between GPUs of one host by their copy engines, so that kernels keep all multiprocessors.

Each rank copies what it receives from the memory of its peers. Stream memory operations on flags in the windows order
the copies (cuStreamWriteValue32, cuStreamWaitValue32).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from adtrain.backends.cuda.peer_window import copy_flags_at
from adtrain.backends.cuda.runtime.errors import checked
from adtrain.backends.cuda.runtime.peer_memory import PeerMemory, mapped_by_all
from adtrain.core.errors import DeviceError

MIN_BYTES = 4 << 20
"""Shorter items use other transports: flags and copies of an exchange take about 20 us."""
READY, DONE = 0, 1
"""The flags of a peer: what it sends is complete; it has copied what it receives. Both are 0 between exchanges."""
FLAG_BYTES = 4


class CopyEngines:
    """A `Transport` for items in memory that all ranks have mapped. Exchanges run one after another."""

    name: str = "copy engines"
    max_bytes: int | None = None

    def __init__(self, peers: PeerMemory) -> None:
        *self.windows, self.rank = peers.device.windows
        self.flags_at = copy_flags_at(len(self.windows))
        self.mapped: dict[int, tuple[Any, int, list[Any]]] = {}

    def map(self, memory: Any, size: int) -> None:
        """Let the peers read memory that `Device.reserve` returned. All ranks call it at the same time.

        The memory is kept until the process ends, as peers may not unmap it earlier.

        Raises:
            DeviceError: a GPU cannot map it.
        """
        if int(memory) in self.mapped:
            return
        views = mapped_by_all(memory)
        if views is None:
            raise DeviceError(f"a GPU cannot map {size:,} bytes of another GPU")
        self.mapped[int(memory)] = memory, size, views

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        on = driver.CUstream(stream.handle)
        first = 0 if name == "all_gather" else self.rank * size
        self._set(READY, on)
        checked(driver.cuMemcpyDtoDAsync(received + self.rank * size, sent + first, size, on))
        self._wait(READY, on)
        views = self._views(sent)
        for peer in self._peers():
            checked(driver.cuMemcpyDtoDAsync(received + peer * size, views[peer] + first, size, on))
        self._set(DONE, on)
        self._wait(DONE, on)

    def _views(self, address: int) -> list[int]:
        """Where this rank sees the memory of each rank that is at `address` in its own."""
        start, views = next((a, v) for a, (_, size, v) in self.mapped.items() if a <= address < a + size)
        return [int(view) + address - start for view in views]

    def _peers(self) -> Iterator[int]:
        """The other ranks. At any time each rank reads the memory of another one."""
        ranks = len(self.windows)
        return ((self.rank + i) % ranks for i in range(1, ranks))

    def _set(self, flag: int, on: Any) -> None:
        for peer in self._peers():
            checked(driver.cuStreamWriteValue32(on, self._flag(self.windows[peer], flag, self.rank), 1, 0))

    def _wait(self, flag: int, on: Any) -> None:
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        for peer in self._peers():
            own = self._flag(self.windows[self.rank], flag, peer)
            checked(driver.cuStreamWaitValue32(on, own, 1, equal))
            checked(driver.cuStreamWriteValue32(on, own, 0, 0))

    def _flag(self, window: int, flag: int, rank: int) -> int:
        return window + self.flags_at + FLAG_BYTES * (2 * rank + flag)
