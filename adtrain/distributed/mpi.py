"""Exchanges between CPUs by MPI."""

from __future__ import annotations

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
        world = mpi().COMM_WORLD
        self.world: Any = world
        self.rank: int = world.Get_rank()
        self.size: int = world.Get_size()
        self.entered = self.left = 0
        self.shares_memory = self.shared_memory(1) is not None

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


def mpi() -> Any:
    """The module mpi4py.MPI, which starts MPI when it is first imported.

    Raises:
        AdtrainError: mpi4py or an MPI library is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise AdtrainError(f"MPI needs mpi4py and an MPI library: {ADVICE} ({reason})") from None
    return MPI


def version() -> str:
    """The MPI library and mpi4py, with their versions. MPI is not started. Raises AdtrainError as `mpi` does."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
    except ImportError:
        mpi()  # raises the error that says how to install it
    module = mpi()
    name, numbers = module.get_vendor()
    return f"{name} {'.'.join(map(str, numbers))}, mpi4py {mpi4py.__version__}"


def _bytes(x: np.ndarray) -> np.ndarray:
    """The memory of an array, as bytes."""
    return x.reshape(-1).view(np.uint8)
