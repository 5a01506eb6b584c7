"""Exchanges between CPUs by MPI."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import numpy as np

from adtrain.core.errors import AdtrainError
from adtrain.distributed.shared_memory import common_memory

ADVICE = "pip install 'adtrain[mpi]'"


class MpiCommunicator:
    """The ranks of MPI_COMM_WORLD.

    Attributes:
        entered, left: how many exchanges this rank has begun and ended, for the watchdog.
    """

    def __init__(self) -> None:
        self.module = mpi()
        if not self.module.Is_initialized():
            _call(self.module, "MPI_Init_thread", None, None, self.module.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        world = self.module.COMM_WORLD
        self.world: Any = world
        self.rank: int = world.Get_rank()
        self.size: int = world.Get_size()
        self.entered = self.left = 0
        self.shares_memory = self.shared_memory(1) is not None

    def close(self) -> None:
        """End MPI. It waits for the other ranks."""
        if not self.module.Is_finalized():
            _call(self.module, "MPI_Finalize")

    def shared_memory(self, size: int) -> np.ndarray | None:
        return common_memory(self, size)

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
        self.entered += 1
        self.world.Allgather(_bytes(send), _bytes(receive))
        self.left += 1

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> None:
        self.entered += 1
        self.world.Alltoall(_bytes(send), _bytes(receive))
        self.left += 1


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
        raise AdtrainError(f"MPI needs mpi4py and an MPI library: {ADVICE} ({reason})") from None
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


def _bytes(x: np.ndarray) -> np.ndarray:
    """The memory of an array, as bytes."""
    return x.reshape(-1).view(np.uint8)
