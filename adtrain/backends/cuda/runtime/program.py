"""Programs on the GPU: kernels captured in a CUDA graph, in memory that is planned in advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from sys import getrefcount
from typing import Any, NamedTuple

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.launch_plan import LaunchPlan, Plan
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.device import Buffer, Device, Guarded
from adtrain.backends.cuda.runtime.dlpack_exchange import Borrowed
from adtrain.backends.cuda.runtime.exchanges import Exchanges, ExchangeWork
from adtrain.backends.cuda.runtime.launch import Graphs, Marks, Runnable, recording
from adtrain.backends.cuda.runtime.layout import Layout, runs_per_graph
from adtrain.backends.cuda.vendor import LibraryCall
from adtrain.core.backend import KernelRun
from adtrain.core.errors import DeviceError
from adtrain.core.memory import OutOfBounds, is_poisoned
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, label
from adtrain.core.timeline import during
from adtrain.core.types import ArrayType
from adtrain.passes.order import exchange_done_p
from adtrain.passes.plan_memory import stored_bytes

RUNS_PER_LAUNCH = 100, 10, 1
"""Consecutive runs in one launch, for a Program whose launch computes several runs. So it reads and writes once what it
keeps on chip."""

LARGE = 2**20
"""Bytes of an output from which on it is returned without a copy, where possible."""

MANY = 8
"""More small outputs are treated as large ones, if there is no large one: each copy takes the host microseconds."""
RETURNED_SETS = 2
"""Sets of memory for large outputs that are returned without a copy: one may be in use while the other is written."""


class Lowered(NamedTuple):
    """A Program as it is kept: the places of its values, and the launches of its equations."""

    layout: Layout
    plans: dict[Equation, Plan]


class CudaProgram:
    """A Program with its memory and its launches.

    Args:
        empty: makes a buffer with undefined elements.
        exchanges: those with other ranks. It is called if the Program has any.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        lowering: Lowering,
        empty: Callable[[ArrayType], Buffer],
        exchanges: Callable[[], Exchanges],
        lowered: Lowered | None = None,
    ) -> None:
        self.device, self.lowering, self.empty, self.exchanges = device, lowering, empty, exchanges
        self.layout = layout = Layout(program, lowering) if lowered is None else lowered.layout
        self.memory = layout.memory
        self.arena = self.device.reserve(layout.arena_bytes)
        self.base = int(self.arena)
        self.constants = [x.buffer for x in program.constants.values()]
        self.prefetched = [empty(v.stored) for v in layout.inputs[len(program.inputs) :]]
        returned = {x.at: layout.outputs[x.at] for x in layout.results if x.where == "output"}
        self.large = {at: v.stored for at, v in returned.items() if stored_bytes(v) >= LARGE}
        if not self.large and len(returned) > MANY:
            self.large = {at: v.stored for at, v in returned.items()}
        self.large_outputs: list[dict[int, Buffer]] = []
        self.owned = {at: empty(layout.outputs[at].stored) for at in layout.owned if at not in self.large}
        self.copied = [at for at in returned if at in self.owned]
        outputs = [self.owned[at].address if at in self.owned else 0 for at in range(len(layout.outputs))]
        # By address number; see `Layout`. Those of the Program's inputs and large outputs are set before each run.
        self.addresses = [0] * len(program.inputs)
        self.addresses += [buffer.address for buffer in (*self.prefetched, *self.constants)]
        self.first_output = len(self.addresses)
        self.addresses += [*outputs, *(self.base + byte for byte in layout.arena)]

        self.joined_later = {e.inputs[0] for e in program.equations if e.primitive is exchange_done_p}
        self.flagged: dict[Equation, int] = {}
        self.equations = program.equations
        distinct = dict.fromkeys(step.equation for steps, _ in layout.runs(2) for step in steps)
        found = [plan.source for e in distinct for plan in lowering.launches(e) if isinstance(plan, LaunchPlan)]
        self.placed = tuple(distinct)
        self.compilations = compiler.begin(dict.fromkeys(found), self.device.architecture)
        self.repeats = layout.repeats
        if layout.in_one_launch:
            self.runs_at_once: Sequence[int] = RUNS_PER_LAUNCH
        else:
            launches = sum(len(lowering.launches(e)) for e in program.equations)
            self.runs_at_once = runs_per_graph(launches)
        self.results = [(x.where, x.at, v.stored.shape) for x, v in zip(layout.results, program.outputs, strict=True)]
        self.graphs = Graphs(self.device)
        self.marks: Marks | None = None

    @cached_property
    def works(self) -> Mapping[Equation, Runnable | ExchangeWork]:
        """The equations with their kernels, which are waited for and loaded."""
        found: dict[Equation, Runnable | ExchangeWork] = {}
        sent_from_arena = self.layout.sent_from_arena
        with during("compile"):
            for e in self.placed:
                work: Runnable | ExchangeWork
                if e.has(Trait.COLLECTIVE):
                    memory = (self.arena, self.layout.arena_bytes) if e in sent_from_arena else ()
                    work = ExchangeWork(self.exchanges(), e, *memory)
                else:
                    work = Runnable(self.device, self.lowering, e)
                found[e] = work
                self.flagged[e] = self.device.flags.reserve(_label(e)) if work.checked else 0
        return found

    @property
    def lowered(self) -> Lowered | None:
        """The layout and the plans, to be kept; None if a library computes an equation."""
        lowering = self.lowering
        plans = {e: Plan(lowering.launches(e), lowering.scratch(e)) for e in self.placed}
        of_library = any(isinstance(launch, LibraryCall) for plan in plans.values() for launch in plan.launches)
        return None if of_library else Lowered(self.layout, plans)

    @property
    def kernels(self) -> Sequence[Sequence[KernelRun]]:
        return [self.works[e].kernels for e in self.equations]

    @property
    def ready(self) -> bool:
        return all(each.done() for each in self.compilations)

    def finish(self) -> None:
        self.works  # noqa: B018

    def run(
        self, buffers: list[Buffer], timed: bool = False, times: int = 1
    ) -> tuple[Sequence[Buffer], Sequence[float]]:
        self.finish()
        for i in self.layout.overwritten:
            if used_elsewhere(buffers, i):
                buffers[i] = self._copy(buffers[i])
        large, keep = self._large_outputs()
        for i, buffer in enumerate(buffers):
            self.addresses[i] = buffer.address
        for at, buffer in large.items():
            self.addresses[self.first_output + at] = buffer.address
        key = (*self.addresses[: len(buffers)], *(buffer.address for buffer in large.values()))
        seconds: Sequence[float] = ()
        if timed:
            seconds = self._timed(key)
        else:
            for at_once in self.runs_at_once:
                runs, times = divmod(times, at_once)
                for _ in range(runs):
                    self.graphs.run((key, at_once), partial(self._record, at_once))
        if is_poisoned():
            self._check_guards({**self.owned, **large})
        fresh = {at: self._copy(self.owned[at]) for at in self.copied}
        fresh |= {at: self._copy(x) if keep else x.of_shape(x.shape) for at, x in large.items()}
        sources: dict[str, Any] = {"input": buffers, "constant": self.constants, "output": fresh}
        found = ((sources[where][at], shape) for where, at, shape in self.results)
        return [x if x.shape == shape else x.of_shape(shape) for x, shape in found], seconds

    def _record(self, times: int, after_each: Callable[[], None] | None = None) -> None:
        """Enqueue ``times`` runs on the stream while it is captured.

        Raises:
            DeviceError: an equation, which it names, cannot be captured.
        """
        addresses = list(self.addresses)
        joins: dict[Variable, Callable[[], None]] = {}  # of exchanges that are not waited for yet
        overlap = True
        in_launch = times if self.layout.in_one_launch else 1
        times //= in_launch
        for steps, swaps in self.layout.runs(times):
            for equation, operands, byte in steps:
                work = self.works[equation]
                given = [addresses[i] + offset for i, offset in operands]
                try:
                    if isinstance(work, ExchangeWork):
                        joins[equation.outputs[0]] = work.start(given)
                    else:
                        work.enqueue(given, self.base + byte, self.flagged[equation], overlap, in_launch)
                        overlap = overlap or bool(work.launches)
                except DeviceError as error:
                    raise DeviceError(f"{_label(equation)} cannot be recorded in a CUDA graph: {error}") from None
                if not recording(self.device.stream):
                    reason = "it waits for the device"
                    raise DeviceError(f"{_label(equation)} cannot be recorded in a CUDA graph: {reason}")
                for v in self._to_join(equation, after_each is not None):
                    joins.pop(v)()
                    overlap = False
                if after_each is not None:
                    after_each()
            for read, written, _ in swaps:
                addresses[read], addresses[written] = addresses[written], addresses[read]
        if times % 2:
            for read, written, size in self.layout.final_swaps:
                self.device.copy(addresses[read], addresses[written], size)

    def _to_join(self, equation: Equation, timed: bool) -> Sequence[Variable]:
        """The results of exchanges to wait for after an equation."""
        if equation.has(Trait.COLLECTIVE):
            return [v for v in equation.outputs if timed or v not in self.joined_later]
        return equation.inputs[:1] if equation.primitive is exchange_done_p and not timed else ()

    def _timed(self, key: tuple[int, ...]) -> Sequence[float]:
        """Run once. Returns the seconds of each equation, by events on the device."""
        if self.marks is None:
            self.marks = Marks(self.device.stream, len(self.equations))
        marks = self.marks

        def record() -> None:
            marks.begin()
            self._record(1, marks.record)

        self.graphs.run((key, "timed"), record)
        self.device.synchronize()
        order = [step.equation for steps, _ in self.layout.runs(1) for step in steps]
        seconds = dict(zip(order, marks.seconds(), strict=True))
        return [seconds[e] for e in self.equations]

    def _check_guards(self, outputs: Mapping[int, Buffer]) -> None:
        """Raise OutOfBounds for the first output beside which something was written."""
        self.device.synchronize()
        for at, buffer in outputs.items():
            if isinstance(buffer.memory, Guarded) and not buffer.memory.intact():
                v = self.layout.outputs[at]
                raise OutOfBounds(next(e.name for e in self.equations if v in e.outputs))

    def _large_outputs(self) -> tuple[dict[int, Buffer], bool]:
        """Buffers for the large outputs of a run, and whether the Program keeps them and returns copies.

        Each set of addresses needs a graph of its own, so there are few sets. A set is free when the caller holds no
        output that lies in it.
        """
        for buffers in self.large_outputs[:RETURNED_SETS]:
            if all(getrefcount(buffer.memory) == 2 for buffer in buffers.values()):  # the buffer and the argument
                return buffers, False
        if len(self.large_outputs) <= RETURNED_SETS:
            self.large_outputs.append({at: self.empty(type_) for at, type_ in self.large.items()})
        return self.large_outputs[-1], len(self.large_outputs) > RETURNED_SETS

    def _copy(self, buffer: Buffer) -> Buffer:
        copied = self.empty(ArrayType(buffer.shape, buffer.dtype))
        self.device.copy(buffer.address, copied.address, buffer.nbytes)
        return copied


def used_elsewhere(buffers: Sequence[Buffer], i: int) -> bool:
    """Whether a buffer in a list must not change: it or its memory is used elsewhere, or belongs to another library."""
    # References: the list and getrefcount's argument.
    used = getrefcount(buffers[i]) > 2 or getrefcount(buffers[i].memory) > 2
    return used or isinstance(buffers[i].memory, Borrowed)


def _label(equation: Equation) -> str:
    name = label(equation)
    return f"{name} (in {equation.scope})" if equation.scope else name
