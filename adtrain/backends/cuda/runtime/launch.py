"""The launches of one equation on a device, kernels or library calls, eagerly or captured in a graph.

The launches of a CUDA graph are captured from a stream once, and then launched by one call. Streams wait for one
another by events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from cuda.bindings import driver

from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Candidate, Lowering
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.driver import MAP_WORD, ShapedLaunch, Start, captured, checked
from adtrain.backends.cuda.vendor import LibraryCall
from adtrain.core.backend import KernelRun
from adtrain.core.kernel import TensorMap
from adtrain.core.program import Equation

TENSOR_MAP_WORDS = 16
"""The 64-bit words of a tensor map."""
UINT32, UINT64 = driver.cuuint32_t, driver.cuuint64_t
ELEMENTS = {
    2: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    4: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
}
"""The type of an element, by its bytes. Copies round float32 to tf32."""
SWIZZLES = {
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
}
"""The swizzle, by the bytes of a row of a box."""


class Launch:
    """A plan with its loaded kernel. Only the addresses are open.

    Attributes:
        alone: the launch that starts when all work before it is complete.
        early: the one that may start before the previous kernel has ended; see `LoadedKernel.spread`. None if it should
            not.
    """

    def __init__(self, device: Device, plan: LaunchPlan) -> None:
        self.plan, self.device = plan, device
        self.checked, self.empty = plan.checked, plan.size.empty
        if self.empty:
            return
        self.windows = device.windows if plan.peers else ()
        numbers = "".join("d" if isinstance(x, float) else "q" for x in plan.numbers) + "q" * plan.repeats
        maps = MAP_WORD * TENSOR_MAP_WORDS * len(plan.maps)
        format = maps + "P" * len(plan.operands) + numbers + "P" * (plan.scratch + plan.checked + len(self.windows))
        self.kernel = device.kernel(plan.source, plan.name, format, plan.size)
        shape = self.kernel.shape(plan.size)
        self.alone = ShapedLaunch(self.kernel, shape, Start.TOGETHER if plan.cooperative else Start.AFTER)
        spread = self.kernel.spread(shape) if device.overlaps and not plan.cooperative else None
        self.early = None if spread is None else ShapedLaunch(self.kernel, spread, Start.EARLY)

    @property
    def ran(self) -> KernelRun:
        """The kernel's name, file and macros, and the launch shape."""
        source, (grid, block, shared) = self.plan.source, self.alone.shape
        tunables = [option.removeprefix("-D") for option in source.options if option.startswith("-D")]
        name = " ".join([self.plan.name, source.name, *tunables])
        return KernelRun(name, {"grid": list(grid), "block": list(block), "shared_bytes": shared})

    def enqueue(self, addresses: list[int], scratch: int, flag: int, overlap: bool = False, runs: int = 1) -> None:
        """Launch on the stream, which may be captured.

        Args:
            addresses: those of the equation's inputs and outputs.
            scratch: the address of its scratch memory.
            flag: the address of its flag for indices out of range.
            overlap: whether it may start while the previous kernel ends: programmatic dependent launch.
            runs: how many runs a plan that `repeats` computes.
        """
        if self.empty:
            return
        plan = self.plan
        last = [runs] * plan.repeats + [scratch] * plan.scratch + [flag] * plan.checked
        launch = self.early if overlap and self.early is not None else self.alone
        maps = (word for x in plan.maps for word in _encoded(x, addresses[x.operand]))
        pointers = (addresses[i] for i in plan.operands)
        launch(self.device.stream, [*maps, *pointers, *plan.numbers, *last, *self.windows])


class LibraryLaunch:
    """A library call on a device's stream; see `Launch`.

    Raises:
        DeviceError: the library does not offer the call, or cannot be loaded.
    """

    checked = empty = False

    def __init__(self, device: Device, call: LibraryCall) -> None:
        call.prepare()
        self.call, self.device = call, device
        self.ran = KernelRun(call.label, {})

    def enqueue(self, addresses: list[int], scratch: int, flag: int, overlap: bool = False, runs: int = 1) -> None:
        """Enqueue the call's work on the stream, which may be captured."""
        self.call.enqueue(addresses, scratch, self.device.stream.handle)


class Runnable:
    """An equation's launches on a device.

    Args:
        kernel: the candidate, by default the chosen one.

    Raises:
        DeviceError: there is no kernel for it.
    """

    def __init__(self, device: Device, lowering: Lowering, equation: Equation, kernel: Candidate | None = None) -> None:
        self.launches = [
            LibraryLaunch(device, plan) if isinstance(plan, LibraryCall) else Launch(device, plan)
            for plan in lowering.launches(equation, kernel)
        ]
        self.scratch = lowering.scratch(equation, kernel)
        self.checked = any(launch.checked for launch in self.launches)
        self.kernels = [launch.ran for launch in self.launches if not launch.empty]

    def enqueue(self, addresses: list[int], scratch: int, flag: int, overlap: bool = False, runs: int = 1) -> None:
        """Launch on the stream, which may be captured. Without `overlap` the first launch waits for all work before."""
        for launch in self.launches:
            launch.enqueue(addresses, scratch, flag, overlap, runs)
            overlap = True


def _encoded(described: TensorMap, address: int) -> Sequence[int]:
    """The TENSOR_MAP_WORDS words of a tensor map, of an array at `address`.

    Raises:
        DeviceError: the driver refuses the map.
    """
    itemsize = described.dtype.itemsize
    strides = [itemsize * n for n in accumulate(described.lengths[:-1], mul)]
    rank = len(described.lengths)
    options = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        SWIZZLES[described.box[0] * itemsize],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    lengths, strides = ([UINT64(n) for n in values] for values in (described.lengths, strides))
    array = ELEMENTS[itemsize], rank, address, lengths, strides
    if described.im2col is None:
        ones = _numbers([1] * rank)
        made = checked(driver.cuTensorMapEncodeTiled(*array, _numbers(described.box), ones, *options))
    else:
        lower, upper, stride = described.im2col
        box = [*lower], [*upper], *described.box
        made = checked(driver.cuTensorMapEncodeIm2col(*array, *box, _numbers((1, *stride, 1)), *options))
    return [int(word) for word in made.opaque]


def _numbers(values: Sequence[int]) -> list[driver.cuuint32_t]:
    return [UINT32(n) for n in values]


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
