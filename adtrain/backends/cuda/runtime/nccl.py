"""Exchanges between GPUs by NCCL, on a stream of their own, so that kernels run meanwhile. NCCL only moves bytes.

NVIDIA's binding nccl4py is used through its raw layer, which takes addresses and stream handles as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda.nccl_library import library
from adtrain.backends.cuda.runtime.device import NON_BLOCKING, Device
from adtrain.backends.cuda.runtime.errors import checked, translated
from adtrain.core import communicator
from adtrain.core.backend import KernelRun
from adtrain.core.errors import DeviceError
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation
from adtrain.passes.plan_memory import nbytes

BYTES = 1
"""ncclUint8."""


class Nccl:
    """The NCCL communicator of this rank. All ranks make it at the same time.

    Raises:
        DeviceError: nccl4py or NCCL is missing, or the ranks cannot connect.
    """

    @translated()
    def __init__(self, device: Device) -> None:
        self.library = library()
        self.device = device
        self.main = driver.CUstream(device.stream.handle)
        self.side = cuda.Stream(NON_BLOCKING)
        self.stream = driver.CUstream(self.side.handle)
        ranks = communicator.current()
        identifier = self.library.get_unique_id() if ranks.rank == 0 else self.library.UniqueId()
        everywhere = communicator.all_gathered(np.frombuffer(bytes(identifier), np.uint8))
        identifier = self.library.UniqueId.from_buffer(everywhere[0].tobytes())
        self.ranks = ranks.size
        try:
            self.comm = self.library.comm_init_rank(ranks.size, identifier, ranks.rank)
        except Exception as error:  # the binding's own class
            raise DeviceError(f"NCCL cannot connect {ranks.size} ranks: {error}") from None
        self._connect()

    def _connect(self) -> None:
        """One exchange of each kind outside of a graph: NCCL sets up its connections in the first one."""
        memory = int(buffer := self.device.allocate(2 * 64 * self.ranks))
        for name in ("all_gather", "all_to_all"):
            self.enqueue(name, memory, memory + 64 * self.ranks, 64)
        self.side.synchronize()
        del buffer

    def enqueue(self, name: str, sent: int, received: int, size: int) -> None:
        """Enqueue an exchange on its stream; `size` is the bytes for one rank."""
        method = self.library.all_gather if name == "all_gather" else self.library.allto_all
        method(sent, received, size, BYTES, self.comm, self.side.handle)

    def fork(self) -> None:
        """The exchange stream waits for the work so far of the main one."""
        self._after(self.main, self.stream)

    def join(self, event: Any) -> None:
        """The main stream waits for an exchange."""
        checked(driver.cuStreamWaitEvent(self.main, event, 0))
        checked(driver.cuEventDestroy(event))

    def mark(self) -> Any:
        """An event after the last exchange."""
        event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        checked(driver.cuEventRecord(event, self.stream))
        return event

    def _after(self, first: Any, then: Any) -> None:
        event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        checked(driver.cuEventRecord(event, first))
        checked(driver.cuStreamWaitEvent(then, event, 0))
        checked(driver.cuEventDestroy(event))


class ExchangeWork:
    """An exchange as the work of an equation; see `Runnable`."""

    scratch, checked = 0, False

    def __init__(self, nccl: Nccl, equation: Equation) -> None:
        assert equation.has(Trait.COLLECTIVE)
        self.nccl, self.name = nccl, equation.primitive.name
        received = nbytes(equation.outputs[0])
        self.size = received // nccl.ranks
        self.kernels = [KernelRun(f"NCCL {self.name}", {"bytes": received})]

    def start(self, addresses: Sequence[int]) -> Any:
        """Enqueue the exchange after the work so far; returns the event to join."""
        self.nccl.fork()
        self.nccl.enqueue(self.name, addresses[0], addresses[1], self.size)
        return self.nccl.mark()
