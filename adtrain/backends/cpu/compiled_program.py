"""Programs as compiled code: one call per run, in memory planned beforehand."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from sys import getrefcount
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from adtrain.backends.cpu import compiler
from adtrain.backends.cpu.codegen import Generated, generate, workspace
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cpu.threads import TeamSize, require_threads, usable
from adtrain.core import communicator
from adtrain.core.backend import KernelRun, Memory
from adtrain.core.communicator import Communicator
from adtrain.core.errors import OutOfMemory, ShapeError
from adtrain.core.memory import (
    GUARD,
    POISON,
    OutOfBounds,
    address,
    copy_aligned,
    empty_aligned,
    is_aligned,
    is_poisoned,
)
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.timeline import during
from adtrain.passes.plan_memory import MemoryPlan, Place, Slots, plan_memory


@cache
def rank_barrier() -> Any:
    """The C function of rank_barrier.h. Raises CompilerError."""
    function = compiler.load('#include "rank_barrier.h"\n', (), ("rank_barrier",)).rank_barrier
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32]
    function.restype = ctypes.c_int64
    return function


class RankMemory:
    """Shared memory with slots: see `passes.plan_memory`. All ranks make it and call its methods together.

    Attributes:
        memory: all of it, as bytes.

    Raises (when made) OutOfMemory: the system does not give the memory.
    """

    def __init__(self, program: Program, slots: Slots, ranks: Communicator) -> None:
        self.program, self.slots, self.ranks = program, slots, ranks
        memory = ranks.shared_memory(slots.size)
        if memory is None:
            raise OutOfMemory(f"the ranks cannot share {slots.size:,} bytes of memory")
        self.memory, self.barriers = memory, 0
        self.place = address(memory), ranks.rank, ranks.size
        self.inputs = {}
        for i, start in slots.inputs.items():
            v = program.inputs[i]
            self.inputs[i] = memory[start : start + v.nbytes].view(v.type.dtype).reshape(v.type.shape)

    def barrier(self) -> None:
        """Wait until all ranks have arrived. The watchdog ends a process that waits for a dead rank."""
        self.barriers += 1
        self.ranks.entered += 1
        while not rank_barrier()(*self.place, self.barriers):
            pass  # here Python may handle a signal
        self.ranks.left += 1

    def fill(self, buffers: list[np.ndarray]) -> None:
        """Copy the inputs that are in slots, and replace them in `buffers`."""
        self.barrier()  # all have read the last results
        for i, x in self.inputs.items():
            np.copyto(x, buffers[i])  # all ranks write the same bytes
            buffers[i] = x

    def exchange(self, number: int, send: np.ndarray, receive: np.ndarray) -> Callable[[], None]:
        """A function that runs the exchange of an equation. Values that are not in its slot are copied."""
        start, rank, size = self.slots.starts[number], self.ranks.rank, self.ranks.size
        slot = self.memory[start : start + size * send.nbytes].view(send.dtype).reshape(size, *send.shape)
        gathers = self.program.equations[number].primitive.name == "all_gather"
        own, others = slot[rank], slot if gathers else slot[:, rank]
        copies_own, copies_others = address(own) != address(send), address(others) != address(receive)

        def run() -> None:
            if copies_own:
                own[...] = send
            self.barrier()
            if copies_others:
                receive[...] = others

        return run


PAGE = 4096
THREADS = "#include <omp.h>\n#include <stdint.h>\n\nint64_t threads(void) { return omp_get_max_threads(); }\n"


class Lowered(NamedTuple):
    """A Program as it is kept: the places of its values, and its C source.

    Both depend on the Program and on the ranks that share memory, not on the number of threads, the processor or the
    compiler.
    """

    plan: MemoryPlan
    generated: Generated


class CompiledProgram:
    """A Program in a shared library, with its arena and scratch memory per thread.

    Args:
        lowered: of the same Program, from a cache. It is made here if it is not given. It has no guard zones, so it
            must not be given while memory is poisoned.

    Raises (when made) compiler.CompilerError: there is no compiler that works; ThreadLimit: threads cannot be started.
    """

    def __init__(self, program: Program, lowered: Lowered | None = None) -> None:
        self.program = program
        self.guard = GUARD if is_poisoned() else 0
        self.lowered = lowered or _lower(program, self.guard)
        self.plan, generated = self.lowered
        self.checked = generated.checked
        with during("compile"):
            library = compiler.load(generated.text, generated.sources, (*generated.entries, "threads"))
            if self.plan.slots is not None:
                rank_barrier()
        self.calls = [getattr(library, entry) for entry in generated.entries]
        for function in (*self.calls, library.threads):
            function.restype = ctypes.c_int64
        self.exchanges = [i for i, e in enumerate(program.equations) if e.has(Trait.COLLECTIVE)]

        threads = usable(library.threads())
        require_threads(threads - 1)
        self.team = TeamSize(threads)
        self.kernels: Sequence[Sequence[KernelRun]] = [
            [KernelRun(name, {"threads": threads}) for name in names] for names in generated.kernels
        ]
        self.memory = _memory(program, self.plan, generated.scratch * threads)
        self.arena = _pages(self.plan.arena_bytes)
        self.scratch = _pages(generated.scratch * threads)
        self.seconds = np.empty(len(program.equations))
        self.constants = [copy_aligned(x.numpy()) for x in program.constants.values()]
        inputs, self.first_output = len(program.inputs), len(program.inputs) + len(self.constants)
        self.first_part = self.first_output + len(program.outputs)
        self.part_places = self.plan.part_places
        self.io = (ctypes.c_void_p * (self.first_part + len(self.part_places)))()
        self.io[inputs : self.first_output] = [address(x) for x in self.constants]
        addresses = ctypes.addressof(self.io), address(self.arena), address(self.scratch)
        self.arguments = list(map(ctypes.c_void_p, addresses))
        self.known: list[np.ndarray | None] = [None] * inputs  # what the first pointers of io point to
        self.running = Lock()

        places = [self.plan.places[v] for v in program.outputs]
        assert not any(place.offset for place in places)
        self.rank_memory: RankMemory | None = None
        self.in_slots = self.plan.slots.inputs if self.plan.slots else {}
        overwritten = set(self.plan.in_place.values())
        self.overwritten = [i for i, v in enumerate(program.inputs) if v in overwritten and i not in self.in_slots]
        self.fresh = [(at, program.outputs[at].type) for at in {x.at for x in places if x.where == "output"}]
        self.repeats = program.carries and places == [Place("input", i) for i in _donated(program)]
        self.results = [(x.where, x.at, v.type.shape) for x, v in zip(places, program.outputs, strict=True)]

    @property
    def ready(self) -> bool:
        return True

    def finish(self) -> None:
        """Returns at once: nothing is compiled later."""

    def run(
        self, buffers: list[np.ndarray], timed: bool = False, times: int = 1
    ) -> tuple[Sequence[np.ndarray], Sequence[float]]:
        with self.running:  # pointers and arena are those of one run; another thread of Python waits
            return self._run(buffers, timed, times)

    def _run(self, buffers: list[np.ndarray], timed: bool, times: int) -> tuple[Sequence[np.ndarray], Sequence[float]]:
        io, known, rank_memory = self.io, self.known, self._rank_memory()
        if rank_memory is not None:
            rank_memory.fill(buffers)
        for i in self.overwritten:
            # References of our own: the list's, getrefcount's, and perhaps that of the last run. Any other one, or a
            # view, must not see the array change.
            ours = known[i] is buffers[i]
            shared = getrefcount(buffers[i]) > 2 + ours or _viewed(buffers[i])
            if shared or not (ours or (_owned(buffers[i]) and is_aligned(buffers[i]))):
                buffers[i] = copy_aligned(buffers[i])
        for i, buffer in enumerate(buffers):
            if known[i] is not buffer:
                if not buffer.flags.c_contiguous:
                    buffers[i] = buffer = copy_aligned(buffer)
                known[i] = buffer
                io[i] = address(buffer)
        fresh, allocated = {}, {}
        for i, (shape, dtype) in self.fresh:
            allocated[i], fresh[i] = _guarded(shape, dtype, self.guard)
            io[self.first_output + i] = address(fresh[i])
        seconds = ctypes.c_void_p(address(self.seconds) if timed else None)
        sources: dict[str, Any] = {"input": buffers, "constant": self.constants, "output": fresh}
        if rank_memory is not None:
            sources["shared"] = [rank_memory.memory]
        for i, (where, at, offset) in enumerate(self.part_places, self.first_part):
            io[i] = address(sources[where][at]) + offset
        exchanges = [self._exchange(i, sources) for i in self.exchanges]
        while times:
            runs, started = min(times, self.team.runs), perf_counter()
            arguments = (*self.arguments, ctypes.c_int64(self.team.size), seconds)
            for _ in range(runs):
                if rank_memory is not None:
                    rank_memory.barrier()  # no rank writes a slot that another one still reads
                for call, exchange in zip_longest(self.calls, exchanges):
                    failed = call(*arguments)
                    if failed:
                        raise self._index_error(self.checked[failed - 1], buffers)
                    if exchange is not None:
                        exchange()
            if not exchanges:  # the time to wait for other ranks depends on them
                self.team.ran(runs, perf_counter() - started)
            times -= runs
        if self.guard:
            self._check_guards(allocated)
        results = [
            copy_aligned(buffers[at]) if where == "input" and at in self.in_slots else sources[where][at]
            for where, at, _ in self.results
        ]
        for i, (_, _, shape) in enumerate(self.results):
            if results[i].shape != shape:
                results[i] = results[i].reshape(shape)
        return results, self.seconds.tolist() if timed else ()

    def _rank_memory(self) -> RankMemory | None:
        """The memory that the Program shares with other ranks, which all ranks make in its first run."""
        if self.rank_memory is None and self.plan.slots is not None:
            self.rank_memory = RankMemory(self.program, self.plan.slots, communicator.current())
        return self.rank_memory

    def _exchange(self, number: int, sources: Mapping[str, Any]) -> Callable[[], None]:
        """The exchange of an equation, between the places of its argument and its result."""
        equation, ranks = self.program.equations[number], communicator.current()
        send, receive = (self._array(v, sources) for v in (*equation.inputs, *equation.outputs))
        if self.rank_memory is not None:
            exchange = self.rank_memory.exchange(number, send, receive)
        else:
            method = ranks.all_gather if equation.primitive.name == "all_gather" else ranks.all_to_all
            exchange = partial(method, send, receive)

        def run() -> None:
            started = perf_counter()
            exchange()
            self.seconds[number] = perf_counter() - started

        return run

    def _array(self, v: Variable, sources: Mapping[str, Any]) -> np.ndarray:
        """The elements of a variable, at its place."""
        where, at, offset = self.plan.places[v]
        if where == "arena":
            return self.arena[at : at + v.nbytes].view(v.type.dtype).reshape(v.type.shape)
        memory: np.ndarray = sources[where][at].reshape(-1).view(np.uint8)
        return memory[offset : offset + v.nbytes].view(v.type.dtype).reshape(v.type.shape)

    def _check_guards(self, outputs: Mapping[int, np.ndarray]) -> None:
        """Raise OutOfBounds for the first equation beside whose values something was written.

        `outputs` are the outputs with their guard zones, as bytes.
        """
        for e in self.program.equations:
            for v in e.outputs:
                where, at, _ = self.plan.places[v]
                if where in ("arena", "output") and v not in self.plan.parts:
                    memory, start = (self.arena, at) if where == "arena" else (outputs[at], self.guard)
                    end = start + v.nbytes
                    zones = memory[start - self.guard : start], memory[end : end + self.guard]
                    if any((zone != POISON).any() for zone in zones):
                        raise OutOfBounds(e.name)

    def _index_error(self, equation: Equation, buffers: list[np.ndarray]) -> ShapeError:
        place = f" (in {equation.scope})" if equation.scope else ""
        if not (self.overwritten or self.exchanges):  # the inputs are as they were: NumPy references find the index
            try:
                NumpyProgram(self.program).run(list(buffers))
            except ShapeError as error:
                return ShapeError(f"{error}{place}")
        return ShapeError(f"{equation.name}: an index is out of range{place}")


def memory(program: Program) -> Memory:
    """The memory that a CompiledProgram of ``program`` allocates.

    Raises compiler.CompilerError: there is no compiler that works, so there can be none.
    """
    library = compiler.load(THREADS, (), ("threads",))
    library.threads.restype = ctypes.c_int64
    plan, generated = _lower(program)
    scratch = generated.scratch * usable(library.threads())
    return _memory(program, plan, scratch)


def _lower(program: Program, guard: int = 0) -> Lowered:
    """The memory plan and the C source. Ranks of one host share memory for the exchanges of the Program."""
    ranks = communicator.current()
    shares = ranks.shares_memory and any(e.has(Trait.COLLECTIVE) for e in program.equations)
    plan = plan_memory(program, workspace, guard, ranks if shares else None)
    return Lowered(plan, generate(program, plan))


def _memory(program: Program, plan: MemoryPlan, scratch: int) -> Memory:
    fresh = {v for v in program.outputs if plan.places[v].where == "output"}
    beside = sum(v.nbytes for v in (*program.constants, *fresh)) + (plan.slots.size if plan.slots else 0)
    return Memory(plan.arena_bytes + beside, plan.separate_bytes + beside, scratch)


def _donated(program: Program) -> list[int]:
    return [i for i, v in enumerate(program.inputs) if v in program.donated]


def _owned(buffer: np.ndarray) -> bool:
    """Whether the array may be written, and NumPy owns its memory. `empty_aligned` returns views of such memory."""
    memory = buffer if buffer.base is None else buffer.base
    return buffer.flags.writeable and isinstance(memory, np.ndarray) and memory.flags.owndata


def _viewed(buffer: np.ndarray) -> bool:
    """Whether the array is a view, and other arrays use its memory. NumPy sets their `base` to the owner of the memory,
    not to this view."""
    return isinstance(buffer.base, np.ndarray) and getrefcount(buffer.base) > 2  # `buffer`, and getrefcount's argument


def _guarded(shape: tuple[int, ...], dtype: np.dtype, guard: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory for an array with `guard` bytes before and after it: all of it as bytes, and the array."""
    if not guard:
        memory = empty_aligned(shape, dtype)
        return memory, memory
    size = math.prod(shape) * dtype.itemsize
    memory = _pages(size + 2 * guard)
    return memory, memory[guard : guard + size].view(dtype).reshape(shape)


def _pages(size: int) -> np.ndarray:
    """`size` bytes, aligned to a page. Raises OutOfMemory."""
    try:
        memory = np.full(size + PAGE, POISON, np.uint8) if is_poisoned() else np.empty(size + PAGE, np.uint8)
    except MemoryError as error:
        raise OutOfMemory(f"not enough memory for the values of a compiled program; {error}") from None
    start = -address(memory) % PAGE
    return memory[start : start + size]
