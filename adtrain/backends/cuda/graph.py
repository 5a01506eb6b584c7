"""CUDA graphs: launches recorded once, and then started together by one call."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from adtrain.backends.cuda.device import checked

_log = logging.getLogger(__name__)

MOST = 8
"""Recordings that one Program keeps, each for other addresses of its inputs."""


class Graphs:
    """Recordings of the same work on a stream, by the addresses that it was recorded with.

    Work is recorded when the same addresses come a second time: by then its kernels are loaded, and those of a loop,
    whose memory goes round, are known.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = driver.CUstream(stream.handle)
        self.recorded: dict[tuple[int, ...], Any] = {}
        self.seen: set[tuple[int, ...]] = set()

    def run(self, addresses: tuple[int, ...], work: Callable[[], None]) -> None:
        """Do ``work``, which only launches kernels, by its recording if there is one."""
        graph = self.recorded.get(addresses)
        if graph is None:
            if addresses not in self.seen or len(self.recorded) == MOST:
                if len(self.seen) < 4 * MOST:
                    self.seen.add(addresses)
                    if len(self.seen) == 4 * MOST:
                        _log.warning("adtrain: a Program's arguments lie elsewhere each time; its kernels start singly")
                work()
                return
            graph = self.recorded[addresses] = self._record(work)
        checked(driver.cuGraphLaunch(graph, self.stream))

    def _record(self, work: Callable[[], None]) -> Any:
        collecting = gc.isenabled()
        gc.disable()  # what it frees could not be waited for
        try:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            checked(driver.cuStreamBeginCapture(self.stream, mode))
            try:
                work()
            finally:
                graph = checked(driver.cuStreamEndCapture(self.stream))
        finally:
            if collecting:
                gc.enable()
        recorded = checked(driver.cuGraphInstantiate(graph, 0))
        checked(driver.cuGraphDestroy(graph))
        return recorded
