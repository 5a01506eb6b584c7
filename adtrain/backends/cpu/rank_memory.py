"""The memory that the ranks of a host share for a Program: its slots, and the barrier of an exchange."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from adtrain.backends.cpu import compiler
from adtrain.core.aligned import address
from adtrain.core.communicator import Communicator
from adtrain.core.errors import OutOfMemory
from adtrain.core.program import Program
from adtrain.passes.place_exchanges import Slots
from adtrain.passes.places import nbytes


@cache
def rank_barrier() -> Any:
    """The C function of rank_barrier.h. Raises CompilerError."""
    function = compiler.load('#include "rank_barrier.h"\n', (), ("rank_barrier",)).rank_barrier
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32]
    function.restype = ctypes.c_int64
    return function


class RankMemory:
    """Shared memory with slots: see `passes.place_exchanges`. All ranks make it and call its methods together.

    Attributes:
        memory: all of it, as bytes.

    Raises (when made) OutOfMemory: the system does not give the memory.
    """

    def __init__(self, program: Program, slots: Slots, ranks: Communicator) -> None:
        self.program, self.slots, self.ranks = program, slots, ranks
        memory = ranks.shared_memory(slots.size)
        if memory is None:
            raise OutOfMemory(f"the ranks cannot share {slots.size:,} bytes of memory")
        self.memory, self.barriers = memory, 0
        self.place = address(memory), ranks.rank, ranks.size
        self.inputs = {}
        for i, start in slots.inputs.items():
            v = program.inputs[i]
            self.inputs[i] = memory[start : start + nbytes(v)].view(v.type.dtype).reshape(v.type.shape)

    def barrier(self) -> None:
        """Wait until all ranks have arrived. The watchdog ends a process that waits for a dead rank."""
        self.barriers += 1
        self.ranks.entered += 1
        while not rank_barrier()(*self.place, self.barriers):
            pass  # here Python may handle a signal
        self.ranks.left += 1

    def fill(self, buffers: list[np.ndarray]) -> None:
        """Copy the inputs that are in slots, and replace them in `buffers`."""
        self.barrier()  # all have read the last results
        for i, x in self.inputs.items():
            np.copyto(x, buffers[i])  # all ranks write the same bytes
            buffers[i] = x

    def exchange(self, number: int, send: np.ndarray, receive: np.ndarray) -> Callable[[], None]:
        """A function that runs the exchange of an equation. Values that are not in its slot are copied."""
        start, rank, size = self.slots.starts[number], self.ranks.rank, self.ranks.size
        slot = self.memory[start : start + size * send.nbytes].view(send.dtype).reshape(size, *send.shape)
        gathers = self.program.equations[number].primitive.name == "all_gather"
        own, others = slot[rank], slot if gathers else slot[:, rank]
        copies_own, copies_others = address(own) != address(send), address(others) != address(receive)

        def run() -> None:
            if copies_own:
                own[...] = send
            self.barrier()
            if copies_others:
                receive[...] = others

        return run
