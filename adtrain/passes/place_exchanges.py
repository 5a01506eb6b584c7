"""Exchanges without copies: ranks of a host compute what they send in memory that they share, and read it there.

Each exchange has a slot in this memory, with a row for each rank. A rank computes what it sends in its own row. After a
barrier it reads the rows of the others. What cannot be in a slot is copied into it or out of it.

All ranks begin a run of a Program together, so nobody writes a row that others still read from the last run. If an
all-gather replaces a donated input, such as parameters, the input is in its slot. Then a rank may write its row after
an exchange that follows all other reads of the input.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from adtrain.core.communicator import Communicator
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.arena import ALIGNMENT, aligned_to_cache_line
from adtrain.passes.places import Place, nbytes, overwrites


@dataclass
class Slots:
    """The slots of a Program's exchanges, the same on all ranks.

    Attributes:
        size: bytes of the shared memory. It begins with a cache line for each rank's counter of barriers.
        starts: the first byte of each slot, by the number of the equation.
        inputs: the first byte of the slot that an input is in, by the number of the input.
    """

    size: int
    starts: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotPlanner:
    """Gives the values that are exchanged places in slots.

    Args:
        root: for each variable the one whose memory it has. Changed.
        offset: the first byte of a variable in that memory, where it is not 0. Changed.
        places: of the roots that are inputs, constants and outputs. Those in slots are added.
    """

    program: Program
    ranks: Communicator
    root: dict[Variable, Variable]
    offset: dict[Variable, int]
    places: dict[Variable, Place]

    def plan(self) -> Slots:
        slots = Slots(self.ranks.size * ALIGNMENT)
        for i, e in enumerate(self.program.equations):
            if e.has(Trait.COLLECTIVE):
                slots.starts[i] = slots.size
                if e.primitive.name == "all_to_all":
                    self._all_to_all(e, slots)
                else:
                    self._all_gather(i, e, slots)
                slots.size += aligned_to_cache_line(self.ranks.size * nbytes(e.inputs[0]))
        return slots

    def _all_to_all(self, e: Equation, slots: Slots) -> None:
        """The slot of an all-to-all is a matrix. Rank r sends row r, and receives column r."""
        sent, received = self.root[e.inputs[0]], self.root[e.outputs[0]]
        row = nbytes(e.inputs[0])
        part = row // self.ranks.size
        if self._free(sent, row):
            self.places[sent] = Place("shared", 0, slots.size + self.ranks.rank * row)
        read = [v for x in self.program.equations if not x.is_view for v in x.inputs if self.root[v] is received]
        inside = part and all(self.offset.get(v, 0) % part + nbytes(v) <= part for v in read)
        if self._alone(received, e) and inside and part % ALIGNMENT == 0:
            self.places[received] = Place("shared", 0, slots.size + self.ranks.rank * part)
            found = {v: start for v, start in self.offset.items() if self.root[v] is received}
            self.offset.update({v: start // part * row + start % part for v, start in found.items()})

    def _all_gather(self, number: int, e: Equation, slots: Slots) -> None:
        """The slot of an all-gather is its output."""
        sent, received = self.root[e.inputs[0]], self.root[e.outputs[0]]
        row = nbytes(e.inputs[0])
        start = self.ranks.rank * row
        free = self._free(sent, row)
        if self._alone(received, e):
            self.places[received] = Place("shared", 0, slots.size)
        elif free and self._replaces(number, sent, received, start):
            slots.inputs[self.places[received].at] = slots.size
        else:
            return
        if free:
            moved = [v for v, r in self.root.items() if r is sent]
            self.root.update(dict.fromkeys(moved, received))
            self.offset.update({v: self.offset.get(v, 0) + start for v in moved})

    def _alone(self, received: Variable, e: Equation) -> bool:
        """Whether what an exchange receives can be in a slot: it is a root, and no part of a concatenation."""
        return received is e.outputs[0] and received not in self.places

    def _free(self, sent: Variable, row: int) -> bool:
        """Whether a root can be computed in a row."""
        return sent not in self.places and nbytes(sent) == row and row % ALIGNMENT == 0

    def _replaces(self, number: int, sent: Variable, received: Variable, start: int) -> bool:
        """Whether sent values can be computed in a donated input, from byte `start` on, before exchange `number`.

        One equation computes them. Between the exchange before it and `number`, nothing else reads the input.
        """
        equations = self.program.equations
        writer = next((i for i, e in enumerate(equations) if sent in e.outputs and not e.is_view), -1)
        exchanges = [i for i, e in enumerate(equations[: max(writer, 0)]) if e.has(Trait.COLLECTIVE)]
        place = self.places.get(received)
        if place is None or place.where != "input" or not exchanges:
            return False
        between = [e for e in equations[exchanges[-1] : number] if not e.is_view]
        read = [(e, v) for e in between for v in e.inputs if self.root[v] is received]
        return all(
            e is equations[writer] and self.offset.get(v, 0) == start and overwrites(e, v, sent) for e, v in read
        )
