"""CUDA graphs, whose launches are captured from a stream once and then launched by one call; events of streams."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any

from cuda.bindings import driver

from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import checked
from adtrain.backends.cuda.runtime.loaded_kernel import captured

MAX_GRAPHS = 8
"""Graphs that are kept: the most recently used."""


class Graphs:
    """Graphs of work on a device's stream, by a key that includes the addresses that the work uses."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded: OrderedDict[Hashable, Any] = OrderedDict()

    @property
    def stream(self) -> Any:
        return driver.CUstream(self.device.stream.handle)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Launch the graph of ``work``. A new one is captured from ``work()``, which launches and copies on the stream.

        Raises:
            DeviceError: it cannot be captured.
        """
        graph = self.recorded.get(key)
        if graph is None:
            if len(self.recorded) == MAX_GRAPHS:
                _, oldest = self.recorded.popitem(last=False)
                checked(driver.cuStreamSynchronize(self.stream))  # it may still run
                checked(driver.cuGraphExecDestroy(oldest))
            graph = self.recorded[key] = self._record(work)
        else:
            self.recorded.move_to_end(key)
        checked(driver.cuGraphLaunch(graph, self.stream))

    def _record(self, work: Callable[[], None]) -> Any:
        graph = captured(self.stream, work)
        recorded = checked(driver.cuGraphInstantiate(graph, 0))
        checked(driver.cuGraphDestroy(graph))
        return recorded


class Marks:
    """Events that time ``count`` consecutive intervals of a stream's work, eager or in a graph."""

    def __init__(self, stream: Any, count: int) -> None:
        self.stream = driver.CUstream(stream.handle)
        self.events = [checked(driver.cuEventCreate(0)) for _ in range(count + 2)]
        self.next_one = 0

    def begin(self) -> None:
        """Call before the first piece of work."""
        self.next_one = 0
        self.record()
        self.record()  # the time between these two is that of an event

    def record(self) -> None:
        """Call after each piece of work."""
        external = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL  # an event of a graph that can be queried
        checked(driver.cuEventRecordWithFlags(self.events[self.next_one], self.stream, external))
        self.next_one += 1

    def seconds(self) -> list[float]:
        """Seconds of each piece of work, without the events' own time. The stream must have passed all events."""
        own, *found = (checked(driver.cuEventElapsedTime(a, b)) * 1e-3 for a, b in pairwise(self.events))
        return [max(elapsed - own, 0.0) for elapsed in found]


def recording(stream: Any) -> bool:
    """Whether a stream is being captured. An operation that waits for the device ends a capture."""
    status = checked(driver.cuStreamIsCapturing(driver.CUstream(stream.handle)))
    return bool(status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)


def order(first: Any, then: Any) -> None:
    """Let stream `then` wait for the work that is on stream `first`."""
    event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    checked(driver.cuEventRecord(event, first))
    checked(driver.cuStreamWaitEvent(then, event, 0))
    checked(driver.cuEventDestroy(event))  # after the wait, says the driver's manual
