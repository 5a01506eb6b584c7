"""Ranks as threads of this process, for tests that need no MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from adtrain.core import communicator

T = TypeVar("T")
SECONDS = 120
"""Longer than any test takes between two exchanges."""


class _Meeting:
    """Where the threads exchange arrays."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.sent: list[Any] = [None] * size


class ThreadRank:
    """The communicator of one thread. It records the name and the shape of each exchange."""

    entered = left = 0

    def __init__(self, meeting: _Meeting, rank: int, shares_memory: bool) -> None:
        self.shares_memory = shares_memory
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.sent)
        self.recorded: list[tuple[str, tuple[int, ...]]] = []

    def shared_memory(self, size: int) -> np.ndarray:
        receive: list[Any] = [None] * self.size
        self._exchange("shared_memory", np.zeros(size, np.uint8), receive, lambda x: x)
        memory: np.ndarray = receive[0]
        return memory

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
        self._exchange("all_gather", send, receive, lambda x: x)

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> None:
        self._exchange("all_to_all", send, receive, lambda x: x[self.rank])

    def _exchange(self, name: str, send: np.ndarray, receive: Any, part: Callable[[Any], Any]) -> None:
        self.recorded.append((name, send.shape))
        self.meeting.sent[self.rank] = send
        self.meeting.barrier.wait()
        for rank, x in enumerate(self.meeting.sent):
            receive[rank] = part(x)
        self.meeting.barrier.wait()


def on_ranks(size: int, function: Callable[[ThreadRank], T], shares_memory: bool = False) -> list[T]:
    """The result of `function` on each of `size` ranks. Raises what the first failing rank raised.

    With `shares_memory`, exchanges of compiled Programs are those of ranks of one host.
    """
    meeting, found, errors = _Meeting(size), dict[int, T](), list[BaseException]()

    def run(rank: int) -> None:
        member = ThreadRank(meeting, rank, shares_memory)
        try:
            with communicator.using(member):
                found[rank] = function(member)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]
