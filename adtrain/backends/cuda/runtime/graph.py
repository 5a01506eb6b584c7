"""CUDA graphs: launches recorded once, and then started together by one call."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any

from cuda.bindings import driver

from adtrain.backends.cuda.runtime.errors import checked

MOST = 8
"""Recordings that are kept, the ones used last."""


class Graphs:
    """Recordings of work on a stream, by what tells them apart: the addresses that the work was recorded with."""

    def __init__(self, stream: Any) -> None:
        self.stream = driver.CUstream(stream.handle)
        self.recorded: OrderedDict[Hashable, Any] = OrderedDict()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do ``work``, which only puts launches and copies on the stream, by its recording.

        Raises:
            DeviceError: it cannot be recorded.
        """
        graph = self.recorded.get(key)
        if graph is None:
            if len(self.recorded) == MOST:
                _, oldest = self.recorded.popitem(last=False)
                checked(driver.cuStreamSynchronize(self.stream))  # it may still run
                checked(driver.cuGraphExecDestroy(oldest))
            graph = self.recorded[key] = self._record(work)
        else:
            self.recorded.move_to_end(key)
        checked(driver.cuGraphLaunch(graph, self.stream))

    def _record(self, work: Callable[[], None]) -> Any:
        collecting = gc.isenabled()
        gc.disable()  # what it frees could not be waited for
        try:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            checked(driver.cuStreamBeginCapture(self.stream, mode))
            try:
                work()
            except BaseException:
                driver.cuStreamEndCapture(self.stream)  # what it says is a consequence
                raise
            graph = checked(driver.cuStreamEndCapture(self.stream))
        finally:
            if collecting:
                gc.enable()
        recorded = checked(driver.cuGraphInstantiate(graph, 0))
        checked(driver.cuGraphDestroy(graph))
        return recorded


class Marks:
    """The moments between ``count`` pieces of work on a stream, in a recording or not."""

    def __init__(self, stream: Any, count: int) -> None:
        self.stream = driver.CUstream(stream.handle)
        self.events = [checked(driver.cuEventCreate(0)) for _ in range(count + 2)]
        self.next_one = 0

    def begin(self) -> None:
        """The first piece of work comes next."""
        self.next_one = 0
        self.record()
        self.record()  # what lies between these two is the time that a mark takes

    def record(self) -> None:
        """The next moment is when the stream gets here."""
        external = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL  # so that it can be read outside the recording
        checked(driver.cuEventRecordWithFlags(self.events[self.next_one], self.stream, external))
        self.next_one += 1

    def seconds(self) -> list[float]:
        """The time of each piece of work, without the marks' own; the stream has passed them all."""
        own, *found = (checked(driver.cuEventElapsedTime(a, b)) * 1e-3 for a, b in pairwise(self.events))
        return [max(elapsed - own, 0.0) for elapsed in found]


def recording(stream: Any) -> bool:
    """Whether what is put on a stream still becomes part of a recording; whatever waits for the device ends it."""
    status = checked(driver.cuStreamIsCapturing(driver.CUstream(stream.handle)))
    return bool(status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)
