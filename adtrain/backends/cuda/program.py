"""Programs on the GPU: their kernels recorded as one CUDA graph, in memory laid out beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from adtrain.backends.cuda.device import Device
from adtrain.backends.cuda.graph import Graphs, Marks, recording
from adtrain.backends.cuda.launch import Launch
from adtrain.backends.cuda.tasks import Candidate, scratch, tasks
from adtrain.backends.cuda.vendor import LibraryCall
from adtrain.core.array import ArrayType
from adtrain.core.backend import KernelRun
from adtrain.core.errors import DeviceError
from adtrain.core.fused import label
from adtrain.core.program import Equation, Program
from adtrain.passes.plan_memory import Place, plan_memory

if TYPE_CHECKING:
    from adtrain.backends.cuda.backend import Buffer, CudaBackend

STEPS_AT_ONCE = 10
"""Runs in a row that one graph holds: between them, too, a kernel's launch overlaps the end of the one before."""


class LibraryLaunch:
    """A library's call on a device's stream; see `Launch`.

    Raises DeviceError (when made): the library has no such call, or cannot be loaded.
    """

    checked = empty = False

    def __init__(self, device: Device, call: LibraryCall) -> None:
        call.prepare()
        self.call, self.stream = call, device.stream.handle
        self.ran = KernelRun(call.label, {})

    def __call__(self, addresses: list[int], scratch: int, flag: int) -> None:
        """Put the call's work on the stream, or into its recording."""
        self.call.enqueue(addresses, scratch, self.stream)

    record = __call__


class Runnable:
    """An equation's launches on a device, by the chosen candidate or a certain one.

    Raises DeviceError (when made): there is no kernel for it.
    """

    def __init__(self, device: Device, equation: Equation, kernel: Candidate | None = None) -> None:
        self.launches = [
            LibraryLaunch(device, task) if isinstance(task, LibraryCall) else Launch(device, task)
            for task in tasks(equation, kernel)
        ]
        self.scratch = scratch(equation, kernel)
        self.checked = any(launch.checked for launch in self.launches)
        self.kernels = [launch.ran for launch in self.launches if not launch.empty]

    def __call__(self, addresses: list[int], memory: int, flag: int) -> None:
        for launch in self.launches:
            launch(addresses, memory, flag)

    def record(self, addresses: list[int], memory: int, flag: int) -> None:
        """Put the launches into the recording of the stream."""
        for launch in self.launches:
            launch.record(addresses, memory, flag)


class CudaProgram:
    """A Program with its arena and its launches."""

    def __init__(self, backend: CudaBackend, program: Program) -> None:
        self.backend, self.device = backend, backend.device
        plan = plan_memory(program, scratch)
        self.arena = self.device.reserve(plan.arena_bytes)
        base = int(self.arena)
        self.constants = [x.buffer for x in program.constants.values()]
        starts = {"input": 0, "constant": len(program.inputs), "output": len(program.inputs) + len(self.constants)}

        # The addresses of all variables by number; those of inputs are filled in before each run.
        self.addresses = [0] * starts["constant"] + [b.address for b in self.constants] + [0] * len(program.outputs)
        slots: dict[Any, int] = {}
        for v, (where, at) in plan.places.items():
            if where == "arena":
                slots[v] = len(self.addresses)
                self.addresses.append(base + at)
            else:
                slots[v] = starts[where] + at
        self.steps = []
        kernels = []
        for e, at in zip(program.equations, plan.workspaces, strict=True):
            work, name = Runnable(self.device, e), _label(e)
            flag = backend.flags.reserve(name) if work.checked else 0
            record = partial(work.record, memory=base + at, flag=flag)
            kernels.append(work.kernels)
            self.steps.append((name, record, [slots[v] for v in (*e.inputs, *e.outputs)]))
        self.kernels: Sequence[Sequence[KernelRun]] = kernels

        places = [plan.places[v] for v in program.outputs]
        overwritten = set(plan.in_place.values())
        self.overwritten = {i for i, v in enumerate(program.inputs) if v in overwritten}
        # Results that lie in no input are computed in memory that stays, for recordings.
        self.lasting = {at: backend.empty(program.outputs[at].type) for where, at in places if where == "output"}
        for at, buffer in self.lasting.items():
            self.addresses[starts["output"] + at] = buffer.address
        donated = [i for i, v in enumerate(program.inputs) if v in program.donated]
        self.repeats = program.carries and all(
            where == "output" or (where, at) == ("input", i) for (where, at), i in zip(places, donated, strict=True)
        )
        self.fed: list[tuple[int, int, int]] = []  # of results that are next values: input, result by number, and bytes
        if self.repeats:
            for (where, at), i in zip(places, donated, strict=True):
                if where == "output":
                    self.fed.append((i, starts["output"] + at, _nbytes(self.lasting[at])))
            self.overwritten.update(i for i, _, _ in self.fed)
            places = [Place("input", i) for i in donated]
        self.results = [(where, at, v.type.shape) for (where, at), v in zip(places, program.outputs, strict=True)]
        self.graphs = Graphs(self.device.stream)
        self.marks: Marks | None = None

    def run(
        self, buffers: list[Buffer], timed: bool = False, times: int = 1
    ) -> tuple[Sequence[Buffer], Sequence[float]]:
        for i in self.overwritten:
            # Held by the list and by getrefcount; its memory by it and by getrefcount. Whoever else holds it must not
            # see it change.
            if getrefcount(buffers[i]) > 2 or getrefcount(buffers[i].memory) > 2:
                buffers[i] = self._copy(buffers[i])
        for i, buffer in enumerate(buffers):
            self.addresses[i] = buffer.address
        key = tuple(self.addresses[: len(buffers)])
        seconds: Sequence[float] = ()
        if timed:
            seconds = self._timed(key)
        else:
            many, single = divmod(times, STEPS_AT_ONCE)
            for at_once, runs in ((STEPS_AT_ONCE, many), (1, single)):
                for _ in range(runs):
                    self.graphs.run((key, at_once), partial(self._record, at_once))
        fresh = {} if self.repeats else {at: self._copy(buffer) for at, buffer in self.lasting.items()}
        sources: dict[str, Any] = {"input": buffers, "constant": self.constants, "output": fresh}
        return [_shaped(sources[where][at], shape) for where, at, shape in self.results], seconds

    def _record(self, times: int, after_each: Callable[[], None] | None = None) -> None:
        """Put so many runs into the recording of the stream.

        A result that is the next value of an input is read where it lies: the two change places from run to run, and
        only an odd number of runs ends with a copy.

        Raises:
            DeviceError: an equation, which it names, cannot be recorded.
        """
        addresses = list(self.addresses)
        for _ in range(times):
            for name, record, operands in self.steps:
                try:
                    record([addresses[i] for i in operands])
                except DeviceError as error:
                    raise DeviceError(f"{name} cannot be recorded in a CUDA graph: {error}") from None
                if not recording(self.device.stream):
                    raise DeviceError(f"{name} cannot be recorded in a CUDA graph: it waits for the device")
                if after_each is not None:
                    after_each()
            for taken, made, _ in self.fed:
                addresses[taken], addresses[made] = addresses[made], addresses[taken]
        if times % 2:
            for taken, made, size in self.fed:
                self.device.copy(addresses[taken], addresses[made], size)

    def _timed(self, key: tuple[int, ...]) -> Sequence[float]:
        """Run once; the time of each equation by the device's clock."""
        if self.marks is None:
            self.marks = Marks(self.device.stream, len(self.steps))
        marks = self.marks

        def record() -> None:
            marks.begin()
            self._record(1, marks.record)

        self.graphs.run((key, "timed"), record)
        self.device.synchronize()
        return marks.seconds()

    def _copy(self, buffer: Buffer) -> Buffer:
        copied = self.backend.empty(ArrayType(buffer.shape, buffer.dtype))
        self.device.copy(buffer.address, copied.address, _nbytes(buffer))
        return copied


def _nbytes(buffer: Buffer) -> int:
    return prod(buffer.shape) * buffer.dtype.itemsize


def _shaped(buffer: Buffer, shape: tuple[int, ...]) -> Buffer:
    return buffer if buffer.shape == shape else type(buffer)(buffer.memory, shape, buffer.dtype)


def _label(equation: Equation) -> str:
    name = label(equation)
    return f"{name} (in {equation.scope})" if equation.scope else name
