"""Communicator: how the ranks of a job exchange arrays. A rank is a process that runs the same Programs as the others.

A communicator only moves bytes. Every sum over ranks is computed by operations, in an order that does not depend on the
number of ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from adtrain.core.setting import Setting


class Communicator(Protocol):
    """The exchanges of a job. All ranks call them in the same order with arrays of equal types.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of ranks.
        shares_memory: whether all ranks are on one host, and `shared_memory` returns memory.
        entered, left: how many exchanges this rank has begun and ended, for the watchdog.
    """

    rank: int
    size: int
    shares_memory: bool
    entered: int
    left: int

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
        """``receive[r]`` becomes rank r's ``send``. Both are C-contiguous."""
        ...

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> None:
        """``receive[r]`` becomes rank r's ``send[rank]``. Both are C-contiguous, with ``size`` items along axis 0."""
        ...

    def shared_memory(self, size: int) -> np.ndarray | None:
        """Zeros that all ranks read and write, uint8 (size,); None on all ranks if there is no such memory."""
        ...


class Alone:
    """The communicator of a job with one rank."""

    rank, size = 0, 1
    shares_memory = False
    entered = left = 0

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
        receive[0] = send

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> None:
        receive[:] = send

    def shared_memory(self, size: int) -> None:
        pass


_current = Setting[Communicator](Alone())


def current() -> Communicator:
    """The communicator of this thread; `Alone` outside of `using`."""
    return _current.value


def using(communicator: Communicator) -> AbstractContextManager[None]:
    """Let this thread be a rank of ``communicator`` in a block."""
    return _current.replaced(communicator)


def all_gathered(x: np.ndarray) -> np.ndarray:
    """``x`` of every rank, (ranks, ...)."""
    communicator = current()
    send = np.ascontiguousarray(x).reshape(x.shape)
    receive = np.empty((communicator.size, *x.shape), x.dtype)
    communicator.all_gather(send, receive)
    return receive


def all_exchanged(x: np.ndarray) -> np.ndarray:
    """For ``x`` of shape (ranks, ...): item r is rank r's ``x[rank]``, where ``rank`` is this rank."""
    receive = np.empty_like(x, order="C")
    current().all_to_all(np.ascontiguousarray(x), receive)
    return receive


def gathered_texts(text: str) -> list[str]:
    """The text of every rank."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = all_gathered(np.array([len(encoded)]))[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(encoded)] = encoded
    return [bytes(x[:n]).decode() for x, n in zip(all_gathered(padded), lengths, strict=True)]
