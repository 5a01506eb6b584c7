"""Shuffles the examples of many members in other processes, while this one trains."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Lock

import numpy as np

from adtrain.child_process import end, started
from adtrain.data import shuffle
from adtrain.data.shuffle import permutation

WORKERS = min(8, os.cpu_count() or 1)
"""Maximum processes that shuffle at a time."""

PROGRAM = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
"""What a process runs: the file `data/shuffle.py`, without the package around it. So it starts fast."""


class ShufflePool:
    """Up to WORKERS processes that shuffle, and a thread that waits for each.

    NumPy holds the GIL while it shuffles, so threads alone would delay training.

    Attributes:
        idle: processes that wait for the next order.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(WORKERS, "shuffle")
        self.lock, self.idle = Lock(), list[subprocess.Popen[bytes]]()
        atexit.register(self.close)

    def submit(self, rows: np.ndarray, seed: int, epoch: int) -> Future[np.ndarray]:
        """`rows` in the order of an epoch. If the other process fails, a thread of this one computes the order."""
        return self.threads.submit(self._shuffled, rows, seed, epoch)

    def _shuffled(self, rows: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        order = self._from_process(len(rows), seed, epoch)
        ordered: np.ndarray = rows[permutation(len(rows), seed, epoch) if order is None else order]
        return ordered

    def _from_process(self, count: int, seed: int, epoch: int) -> np.ndarray | None:
        """The order of `count` examples, from an idle process or a new one; None if it fails."""
        with self.lock:
            process = self.idle.pop() if self.idle else None
        with suppress(OSError):
            process = process or started([sys.executable, "-I", "-c", PROGRAM, shuffle.__file__, *sys.path])
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"%d %d %d\n" % (count, seed, epoch))
            process.stdin.flush()
            order = process.stdout.read(count * np.int64().itemsize)
            if len(order) == count * np.int64().itemsize:
                with self.lock:
                    self.idle.append(process)
                return np.frombuffer(order, np.int64)
        if process is not None:
            end(process)
        return None

    def close(self) -> None:
        """End the processes that are idle."""
        with self.lock:
            ending, self.idle = self.idle, []
        end(*ending)


@cache
def shared_pool() -> ShufflePool:
    """The pool that all waves share."""
    return ShufflePool()
