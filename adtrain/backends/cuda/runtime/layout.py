"""Where the operands of a Program's equations lie, run after run.

Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from adtrain.backends.cuda.lower import Lowering
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.in_a_row import InARow, in_a_row
from adtrain.passes.plan_memory import MemoryPlan, Place, nbytes, plan_memory


class Step(NamedTuple):
    """An equation in a run: the numbers of its operands' addresses, and the byte of the arena where its scratch is."""

    equation: Equation
    operands: Sequence[int]
    scratch: int


class Swap(NamedTuple):
    """Two addresses, by number, that change places after a run: the next one takes what this one has made."""

    taken: int
    made: int
    bytes: int


class Layout:
    """A Program's memory.

    Addresses have numbers: those of `inputs` first, the Program's own and then what is fetched ahead, of constants, of
    `outputs`, the Program's own and then what the next run begins with, and of bytes in the arena.

    Attributes:
        inputs, outputs: variables.
        fresh: the numbers, among `outputs`, of those that have memory of their own.
        arena: a byte for each address in the arena, whose size is `arena_bytes`.
        separate_bytes: see `MemoryPlan`.
        beside_bytes: of constants, of what is fetched ahead, and of fresh outputs, which are computed and handed out.
        repeats: see `Executable`.
        overwritten: the Program's inputs, by number, whose memory it writes to.
        results: where each of the Program's outputs lies in the end.
        back: the swaps that an odd number of runs has to undo, so that the results lie there.
    """

    def __init__(self, program: Program, lowering: Lowering) -> None:
        row, last, again = _planned(program, lowering)
        self.inputs = row.last.inputs
        self.constants = tuple(program.constants)
        self.outputs = row.last.outputs if row.again is None else row.again.outputs
        self.arena: list[int] = []
        self._starts = {"input": 0, "constant": len(self.inputs), "output": len(self.inputs) + len(self.constants)}

        given = {v: Place("input", i) for i, v in enumerate(self.inputs)}
        given |= {v: Place("constant", i) for i, v in enumerate(self.constants)}
        self._begin = self._steps(row.begin, given, [0] * len(row.begin))
        self._last = self._steps(row.last.equations, last.places, last.workspaces)
        self._again: Sequence[Step] = ()
        if row.again is not None and again is not None:
            self._again = self._steps(row.again.equations, again.places, again.workspaces)
        self.arena_bytes = max(
            last.arena_bytes, again.arena_bytes if again else 0, *map(lowering.scratch, row.begin), 0
        )
        self.separate_bytes = last.separate_bytes

        donated = [i for i, v in enumerate(program.inputs) if v in program.donated]
        self.results = [last.places[v] for v in program.outputs]
        self.overwritten = {i for i, v in enumerate(program.inputs) if v in set(last.in_place.values())}
        apart = len(set(self.results)) == len(self.results)
        self.repeats = (
            program.carries
            and apart
            and all(
                place.where == "output" or place == ("input", i) for place, i in zip(self.results, donated, strict=True)
            )
        )
        places = again.places if again else last.places
        self.fresh = sorted({places[v].at for v in self.outputs if places[v].where == "output"})
        fresh = [self.outputs[at] for at in self.fresh]
        handed_out = [v for v in fresh if v in set(program.outputs)]
        beside = (*self.constants, *self.inputs[len(program.inputs) :], *fresh, *handed_out)
        self.beside_bytes = sum(map(nbytes, beside))
        self.back: list[Swap] = []
        self._ahead: list[Swap] = []
        if self.repeats:
            taken = [*donated, *range(len(program.inputs), len(self.inputs))]
            swaps = [
                Swap(i, self._starts["output"] + places[v].at, nbytes(v))
                for i, v in zip(taken, self.outputs, strict=True)
                if places[v].where == "output"
            ]
            self.back = [swap for swap in swaps if swap.taken < len(program.inputs)]
            self._ahead = [swap for swap in swaps if swap.taken >= len(program.inputs)]
            self.overwritten.update(swap.taken for swap in self.back)
            self.results = [Place("input", i) for i in donated]

    def runs(self, times: int) -> Iterator[tuple[Sequence[Step], Sequence[Swap]]]:
        """What `times` runs in a row consist of: steps, and the addresses that change places after them."""
        yield self._begin, ()
        for _ in range(times - 1):
            yield self._again or (*self._begin, *self._last), (*self.back, *self._ahead)
        yield self._last, self.back

    def _steps(self, equations: Sequence[Equation], places: dict[Variable, Place], at: Sequence[int]) -> list[Step]:
        numbers: dict[Variable, int] = {}

        def number(v: Variable) -> int:
            where, i = places[v]
            if where != "arena":
                return self._starts[where] + i
            if v not in numbers:
                numbers[v] = self._starts["output"] + len(self.outputs) + len(self.arena)
                self.arena.append(i)
            return numbers[v]

        return [
            Step(e, [number(v) for v in (*e.inputs, *e.outputs)], byte) for e, byte in zip(equations, at, strict=True)
        ]


def _planned(program: Program, lowering: Lowering) -> tuple[InARow, MemoryPlan, MemoryPlan | None]:
    """The Program for runs in a row, as far as both kinds of runs leave results in the same places."""
    row = in_a_row(program, lowering.target)
    last = plan_memory(row.last, lowering.scratch)
    if row.again is None:
        return row, last, None
    again = plan_memory(row.again, lowering.scratch)
    if any(last.places[v] != again.places[v] for v in program.outputs):
        row = InARow((), None, program)
        return row, plan_memory(program, lowering.scratch), None
    return row, last, again
