"""Programs on the GPU: their kernels one after the other on the stream, in memory laid out beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from adtrain.backends.cuda.device import Device, Launch
from adtrain.backends.cuda.flat import flattened
from adtrain.backends.cuda.graph import Graphs
from adtrain.backends.cuda.tasks import scratch, tasks
from adtrain.core.array import ArrayType
from adtrain.core.program import Equation, Program
from adtrain.passes.plan_memory import plan_memory

if TYPE_CHECKING:
    from adtrain.backends.cuda.backend import Buffer, CudaBackend


class Runnable:
    """An equation's launches on a device.

    Raises DeviceError (when made): there is no kernel for it.
    """

    def __init__(self, device: Device, equation: Equation) -> None:
        self.launches = [Launch(device, task) for task in tasks(equation)]
        self.scratch = scratch(equation)
        self.checked = any(launch.checked for launch in self.launches)

    def __call__(self, addresses: list[int], memory: int, flag: int) -> None:
        for launch in self.launches:
            launch(addresses, memory, flag)


class CudaProgram:
    """A Program with its arena and its launches."""

    def __init__(self, backend: CudaBackend, program: Program) -> None:
        self.backend, self.device = backend, backend.device
        flat, self.origin = flattened(program)
        self.equations = len(program.equations)
        plan = plan_memory(flat, scratch)
        self.arena = self.device.allocate(plan.arena_bytes)
        base = int(self.arena)
        self.constants = [x.buffer for x in flat.constants.values()]
        starts = {"input": 0, "constant": len(flat.inputs), "output": len(flat.inputs) + len(self.constants)}

        # The addresses of all variables by number; those of inputs and results are filled in before each run.
        self.first_output = starts["output"]
        self.addresses = [0] * starts["constant"] + [b.address for b in self.constants] + [0] * len(flat.outputs)
        slots: dict[Any, int] = {}
        for v, (where, at) in plan.places.items():
            if where == "arena":
                slots[v] = len(self.addresses)
                self.addresses.append(base + at)
            else:
                slots[v] = starts[where] + at
        self.steps = []
        for e, at in zip(flat.equations, plan.workspaces, strict=True):
            work = Runnable(self.device, e)
            flag = backend.flags.reserve(_label(e)) if work.checked else 0
            self.steps.append((work, [slots[v] for v in (*e.inputs, *e.outputs)], base + at, flag))

        places = [plan.places[v] for v in flat.outputs]
        overwritten = set(plan.in_place.values())
        self.overwritten = [i for i, v in enumerate(flat.inputs) if v in overwritten]
        self.fresh = [(at, flat.outputs[at].type) for at in {at for where, at in places if where == "output"}]
        # Results that lie in no input are computed in memory that stays, for recordings, and handed out as copies.
        self.lasting = {at: backend.empty(type_) for at, type_ in self.fresh}
        for at, buffer in self.lasting.items():
            self.addresses[self.first_output + at] = buffer.address
        self.graphs = Graphs(self.device.stream)
        self.results = [(where, at, v.type.shape) for (where, at), v in zip(places, flat.outputs, strict=True)]

    def run(self, buffers: list[Buffer], timed: bool = False) -> tuple[Sequence[Buffer], Sequence[float]]:
        for i in self.overwritten:
            # Held by the list and by getrefcount; its memory by it and by getrefcount. Whoever else holds it must not
            # see it change.
            if getrefcount(buffers[i]) > 2 or getrefcount(buffers[i].memory) > 2:
                buffers[i] = self._copy(buffers[i])
        addresses = self.addresses
        for i, buffer in enumerate(buffers):
            addresses[i] = buffer.address
        marks: list[Any] = []
        if timed:
            marks.append(self.device.event())
            self._launch(lambda: marks.append(self.device.event()))
        else:
            self.graphs.run(tuple(addresses[: len(buffers)]), self._launch)
        fresh = {i: self._copy(buffer) for i, buffer in self.lasting.items()}
        sources: dict[str, Any] = {"input": buffers, "constant": self.constants, "output": fresh}
        results = [_shaped(sources[where][at], shape) for where, at, shape in self.results]
        return results, self._seconds(marks) if timed else ()

    def _launch(self, after_each: Callable[[], None] | None = None) -> None:
        addresses = self.addresses
        for work, operands, memory, flag in self.steps:
            work([addresses[i] for i in operands], memory, flag)
            if after_each is not None:
                after_each()

    def _seconds(self, marks: Sequence[Any]) -> Sequence[float]:
        """The time of each equation by the device's clock, from the marks between its members."""
        marks[-1].synchronize()
        seconds = [0.0] * self.equations
        for (before, after), i in zip(pairwise(marks), self.origin, strict=True):
            seconds[i] += after.time_since(before) * 1e-3
        return seconds

    def _copy(self, buffer: Buffer) -> Buffer:
        copied = self.backend.empty(ArrayType(buffer.shape, buffer.dtype))
        self.device.copy(buffer.address, copied.address, prod(buffer.shape) * buffer.dtype.itemsize)
        return copied


def _shaped(buffer: Buffer, shape: tuple[int, ...]) -> Buffer:
    return buffer if buffer.shape == shape else type(buffer)(buffer.memory, shape, buffer.dtype)


def _label(equation: Equation) -> str:
    return f"{equation.primitive.name} (in {equation.scope})" if equation.scope else equation.primitive.name
