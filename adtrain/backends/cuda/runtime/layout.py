"""Where the operands of a Program's equations lie, in one run and in repeated runs. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adtrain.backends.cuda.batch_prefetch import PrefetchedRuns, prefetch_batch
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.backend import Memory
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.plan_memory import MemoryPlan, Place, plan_memory, stored_bytes

RUNS_PER_GRAPH = 10
"""Maximum consecutive runs in one graph. In a graph launches of neighbouring runs overlap, and updates of weights also
write the bfloat16 copies that the next run reads (`batch_prefetch.py`)."""

MAX_LAUNCHES = 4000
"""Maximum launches in a graph of several runs. Recording takes about 30 µs a launch."""


class PlacedEquation(NamedTuple):
    """An equation of a run, its operands, and the byte of the arena where its scratch starts.

    An operand is an address number and an offset in bytes from that address.
    """

    equation: Equation
    operands: Sequence[tuple[int, int]]
    scratch: int


class Swap(NamedTuple):
    """Two address numbers to exchange after a run, so that the next run reads what this run wrote."""

    read: int
    written: int
    bytes: int


@dataclass(init=False, eq=False)
class Layout:
    """The memory of a Program.

    Addresses are numbered: first those of `inputs` (the Program's, then prefetched values), then of constants, then of
    `outputs` (the Program's, then values prefetched for the next run), then bytes of the arena.

    Attributes:
        inputs, outputs: variables.
        owned: the positions in `outputs` of values with memory of their own.
        arena: the byte of each arena address. The arena has `arena_bytes`.
        separate_bytes: see `MemoryPlan`.
        extra_bytes: size of constants, prefetched values and owned outputs, with the copies that are returned.
        repeats: see `Executable`.
        in_one_launch: whether the Program is one launch that computes several runs.
        overwritten: positions of the Program's inputs that it writes to.
        results: where each of the Program's outputs lies after the last run.
        final_swaps: the swaps to undo after an odd number of runs, so that the results lie there.
    """

    inputs: tuple[Variable, ...]
    constants: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    arena: list[int]
    arena_bytes: int
    separate_bytes: int
    extra_bytes: int
    results: list[Place]
    in_one_launch: bool
    overwritten: set[int]
    repeats: bool
    owned: list[int]
    final_swaps: list[Swap]
    _starts: dict[str, int]
    _prologue: Sequence[PlacedEquation]
    _steady: Sequence[PlacedEquation]
    _epilogue: Sequence[PlacedEquation]
    _prefetch_swaps: list[Swap]

    def __init__(self, program: Program, lowering: Lowering) -> None:
        runs, epilogue, steady = _planned(program, lowering)
        self.inputs = runs.epilogue.inputs
        self.constants = tuple(program.constants)
        self.outputs = runs.epilogue.outputs if runs.steady is None else runs.steady.outputs
        self.arena = []
        self._starts = {"input": 0, "constant": len(self.inputs), "output": len(self.inputs) + len(self.constants)}

        at_start = {v: Place("input", i) for i, v in enumerate(self.inputs)}
        at_start |= {v: Place("constant", i) for i, v in enumerate(self.constants)}
        self._prologue = self._placed(runs.prologue, at_start, [0] * len(runs.prologue))
        self._epilogue = self._placed(runs.epilogue.equations, epilogue.places, epilogue.workspaces)
        self._steady = ()
        if runs.steady is not None and steady is not None:
            self._steady = self._placed(runs.steady.equations, steady.places, steady.workspaces)
        plans = (epilogue, steady) if steady else (epilogue,)
        self.arena_bytes = max(*(plan.arena_bytes for plan in plans), *map(lowering.scratch, runs.prologue), 0)
        self.separate_bytes = epilogue.separate_bytes

        donated = [i for i, v in enumerate(program.inputs) if v in program.donated]
        self.results = [epilogue.places[v] for v in program.outputs]
        launches = [launch for e in program.equations for launch in lowering.launches(e)]
        self.in_one_launch = len(launches) == 1 and isinstance(launches[0], LaunchPlan) and launches[0].repeats
        self.overwritten = {i for i, v in enumerate(program.inputs) if v in set(epilogue.in_place.values())}
        distinct = len(set(self.results)) == len(self.results)
        self.repeats = (
            program.carries
            and distinct
            and all(
                place.where == "output" or place == Place("input", i)
                for place, i in zip(self.results, donated, strict=True)
            )
        )
        places = plans[-1].places
        self.owned = sorted({places[v].at for v in self.outputs if places[v].where == "output"})
        owned = [self.outputs[at] for at in self.owned]
        returned = [v for v in owned if v in set(program.outputs)]
        extra = (*self.constants, *self.inputs[len(program.inputs) :], *owned, *returned)
        self.extra_bytes = sum(map(stored_bytes, extra))
        self.final_swaps = []
        self._prefetch_swaps = []
        if self.repeats:
            read = [*donated, *range(len(program.inputs), len(self.inputs))]
            swaps = [
                Swap(i, self._starts["output"] + places[v].at, stored_bytes(v))
                for i, v in zip(read, self.outputs, strict=True)
                if places[v].where == "output"
            ]
            self.final_swaps = [swap for swap in swaps if swap.read < len(program.inputs)]
            self._prefetch_swaps = [swap for swap in swaps if swap.read >= len(program.inputs)]
            self.overwritten.update(swap.read for swap in self.final_swaps)
            self.results = [Place("input", i) for i in donated]

    @property
    def sent_from_arena(self) -> set[Equation]:
        """The exchanges whose argument lies in the arena in every run."""
        first = self._starts["output"] + len(self.outputs)
        steps = [x for part, _ in self.runs(2) for x in part if x.equation.has(Trait.COLLECTIVE)]
        return {x.equation for x in steps} - {x.equation for x in steps if x.operands[0][0] < first}

    @property
    def memory(self) -> Memory:
        """The memory that the Program needs on the device."""
        return Memory(self.arena_bytes + self.extra_bytes, self.separate_bytes + self.extra_bytes, 0)

    def runs(self, times: int) -> Iterator[tuple[Sequence[PlacedEquation], Sequence[Swap]]]:
        """The equations of `times` consecutive runs, in parts, each with the swaps that follow it."""
        yield self._prologue, ()
        for _ in range(times - 1):
            yield self._steady or (*self._prologue, *self._epilogue), (*self.final_swaps, *self._prefetch_swaps)
        yield self._epilogue, self.final_swaps

    def _placed(
        self, equations: Sequence[Equation], places: dict[Variable, Place], scratch: Sequence[int]
    ) -> list[PlacedEquation]:
        numbers: dict[Variable, int] = {}

        def operand(v: Variable) -> tuple[int, int]:
            where, i, offset = places[v]
            if where != "arena":
                return self._starts[where] + i, offset
            if v not in numbers:
                numbers[v] = self._starts["output"] + len(self.outputs) + len(self.arena)
                self.arena.append(i)
            return numbers[v], 0

        return [
            PlacedEquation(e, [operand(v) for v in (*e.inputs, *e.outputs)], byte)
            for e, byte in zip(equations, scratch, strict=True)
        ]


def _planned(program: Program, lowering: Lowering) -> tuple[PrefetchedRuns, MemoryPlan, MemoryPlan | None]:
    """The parts of repeated runs, and the plans of epilogue and steady part, which leave results in the same places."""
    runs = prefetch_batch(program, lowering.target)
    epilogue = plan_memory(runs.epilogue, lowering.scratch)
    if runs.steady is None:
        return runs, epilogue, None
    steady = plan_memory(runs.steady, lowering.scratch)
    if any(epilogue.places[v] != steady.places[v] for v in program.outputs):
        runs = PrefetchedRuns((), None, program)
        return runs, plan_memory(program, lowering.scratch), None
    return runs, epilogue, steady


def runs_per_graph(launches: int) -> Sequence[int]:
    """How many consecutive runs a graph has, the largest number first. A run has `launches` launches.

    Numbers above 1 are even. So results are where the next graph reads them; see `Layout.final_swaps`.
    """
    runs = min(RUNS_PER_GRAPH, MAX_LAUNCHES // max(launches, 1)) // 2 * 2
    return (runs, 1) if runs else (1,)
