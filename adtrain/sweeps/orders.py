"""The orders of the examples of many members, computed beside training."""

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

from adtrain.data import shuffle
from adtrain.data.shuffle import permutation

WORKERS = min(8, os.cpu_count() or 1)
"""Maximum orders that are computed at a time."""

RUN = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"


class Orders:
    """Up to WORKERS threads, each of which waits for a process: NumPy holds Python's global lock while it shuffles."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(WORKERS, "orders")
        self.lock, self.idle = Lock(), list[subprocess.Popen[bytes]]()
        atexit.register(self.close)

    def submit(self, rows: np.ndarray, seed: int, epoch: int) -> Future[np.ndarray]:
        """`rows`, int64, in the order of an epoch. If a process fails, this one computes the order."""
        return self.threads.submit(self._ordered, rows, seed, epoch)

    def _ordered(self, rows: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        found = self._from_process(len(rows), seed, epoch)
        ordered: np.ndarray = rows[permutation(len(rows), seed, epoch) if found is None else found]
        return ordered

    def _from_process(self, count: int, seed: int, epoch: int) -> np.ndarray | None:
        with self.lock:
            process = self.idle.pop() if self.idle else None
        with suppress(OSError):
            process = process or _started()
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
            _end(process)
        return None

    def close(self) -> None:
        """End the processes that are idle."""
        with self.lock:
            ending, self.idle = self.idle, []
        for process in ending:
            _end(process)


@cache
def beside_training() -> Orders:
    """The threads and processes that all waves share."""
    return Orders()


def _started() -> subprocess.Popen[bytes]:
    # In a session of its own, so that Ctrl-C does not reach it. It ends when its stdin is closed, at the latest at the
    # end of this process.
    command = [sys.executable, "-I", "-c", RUN, shuffle.__file__, *sys.path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # closes the pipes and waits
        pass
