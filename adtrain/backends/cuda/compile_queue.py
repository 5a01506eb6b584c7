"""Compilations that wait for a processor: the largest first."""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread, main_thread


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
        # At the end of the process the main thread ends first; then nobody needs the results.
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
