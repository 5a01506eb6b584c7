"""The threads and processes that compile: a thread takes the largest source that waits, and lets a process compile it.

If a process fails, this one compiles its source.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread, main_thread

from adtrain.backends.cuda import nvrtc
from adtrain.backends.cuda.nvrtc import Nvrtc, Request
from adtrain.child_process import end, started

MAX_PROCESSES = 16
"""Maximum processes that compile, this one included."""


class CompileQueue:
    """Runs functions in as many threads as there are processors. A thread ends when no function waits."""

    def __init__(self) -> None:
        self.most = os.cpu_count() or 1
        self.lock, self.numbers = Lock(), itertools.count()
        self.waiting: list[tuple[int, int, Future[None], Callable[[], None]]] = []
        self.threads = 0

    def submit(self, size: int, function: Callable[[], None]) -> Future[None]:
        """Call a function when a thread is free. Functions of larger `size` come first."""
        future = Future[None]()
        with self.lock:
            heapq.heappush(self.waiting, (-size, next(self.numbers), future, function))
            if start := self.threads < self.most:
                self.threads += 1
        if start:
            Thread(target=self._run).start()
        return future

    def _run(self) -> None:
        # At the end of the process the main thread ends first; then the results are not needed.
        while main_thread().is_alive():
            with self.lock:
                if not self.waiting:
                    self.threads -= 1
                    return
                *_, future, function = heapq.heappop(self.waiting)
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class CompileProcesses:
    """Up to one process for each processor. One is started when a source comes while all others compile."""

    def __init__(self, library: Nvrtc) -> None:
        self.library = library
        self.max_started = min(os.cpu_count() or 1, MAX_PROCESSES) - 1
        self.here, self.lock = Lock(), Lock()
        self.idle: list[subprocess.Popen[bytes]] = []
        self.started = 0
        atexit.register(self.close)

    def compile(self, request: Request) -> tuple[bytes | None, str]:
        """`Nvrtc.compile`, in this process if it is idle, otherwise in another one.

        It waits for this process if no other one can be used.
        """
        if self.here.acquire(blocking=False):
            try:
                return self.library.compile(*request)
            finally:
                self.here.release()
        process = self._take()
        if process is not None:
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                found: tuple[bytes | None, str] = pickle.load(process.stdout)
                with self.lock:
                    self.idle.append(process)
                return found
            end(process)
        with self.here:
            return self.library.compile(*request)

    def _take(self) -> subprocess.Popen[bytes] | None:
        """An idle process, or a new one; None if all are busy and no more can be started."""
        with self.lock:
            if self.idle:
                return self.idle.pop()
            if self.started >= self.max_started:
                return None
            self.started += 1
        # Without the module `site`, because only the standard library is imported.
        try:
            return started([sys.executable, "-I", "-S", nvrtc.__file__, self.library.path])
        except OSError:
            return None

    def close(self) -> None:
        """End the processes that are idle."""
        with self.lock:
            ending, self.idle = self.idle, []
        end(*ending)
