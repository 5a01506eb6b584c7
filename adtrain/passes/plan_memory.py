"""The memory plan: where each value of a Program is stored, computed before anything runs.

Values that are not alive at the same time share memory in one block, the arena. A reshape has its argument's memory,
and a subview a part of it. The arguments of a concat view are computed in the memory of its output (`core.views`).
Elementwise results, and those of C kernels that allow it, take the memory of an argument that is not read again.
Results take the memory of donated inputs.

Offsets in the arena are found greedily by size: the largest value first, each at the lowest offset that is free during
its lifetime (Y. Pisarchyk, J. Lee: "Efficient Memory Management for Deep Neural Net Inference", 2020).

Exchanges need no copies where ranks of a host compute what they send in memory that they share, and read it there. Each
exchange has a slot in this memory, with a row for each rank. A rank computes what it sends in its own row. After a
barrier it reads the rows of the others. What cannot be in a slot is copied into it or out of it. All ranks begin a run
of a Program together, so no rank writes a row that others still read from the last run. If an all-gather replaces a
donated input, such as parameters, the input is in its slot. Then a rank may write its row after an exchange that
follows all other reads of the input.

The pass `place_views`, which runs after all other passes, makes subviews of slices and concat views of concatenations.
So the gradients of a bucket are computed in the memory that an exchange sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from adtrain.core.communicator import Communicator
from adtrain.core.kernel import c_kernels, has_kernels
from adtrain.core.primitive import Trait
from adtrain.core.program import HORIZONTAL, LOOPS, OVERWRITES, Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType
from adtrain.core.views import concat_view_p, subview_p
from adtrain.passes.fusion import by_element, is_loops

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector register."""


class Request(NamedTuple):
    """`size` bytes from time `start` to time `end`, both included, for a variable or an equation's workspace."""

    key: Variable | int
    size: int
    start: int
    end: int


class Arena:
    """Requests for memory, each over an interval of time."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def add(self, key: Variable | int, size: int, start: int, end: int) -> None:
        self.requests.append(Request(key, aligned_to_cache_line(size), start, end))

    def offsets(self) -> dict[Variable | int, int]:
        """The offset of each request."""
        offsets: dict[Variable | int, int] = dict.fromkeys((r.key for r in self.requests), 0)
        placed = np.empty((4, len(self.requests)), np.int64)  # those with an offset, as `_lowest_offset` takes them
        largest_first = sorted((r for r in self.requests if r.size), key=lambda r: -r.size)
        for count, request in enumerate(largest_first):
            offset = offsets[request.key] = _lowest_offset(request, placed[:, :count])
            i = np.searchsorted(placed[0, :count], offset, "right")
            placed[:, i + 1 : count + 1] = placed[:, i:count]
            placed[:, i] = offset, offset + request.size, request.start, request.end
        return offsets

    def size(self, offsets: dict[Variable | int, int]) -> int:
        """Bytes of the arena."""
        return max((offsets[r.key] + r.size for r in self.requests), default=0)


def aligned_to_cache_line(size: int) -> int:
    """`size` in bytes, rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _lowest_offset(request: Request, placed: np.ndarray) -> int:
    """The lowest offset at which no placed request shares both time and memory with ``request``.

    Args:
        placed: for each placed request the start and end of its memory and of its time, (4, N), sorted by the first.
    """
    alive = placed[:2, (placed[2] <= request.end) & (placed[3] >= request.start)]
    taken = np.maximum.accumulate(np.concatenate(((0,), alive[1])))  # all memory before each gap
    gaps = np.flatnonzero(alive[0] - taken[:-1] >= request.size)
    return int(taken[gaps[0] if gaps.size else -1])


class Place(NamedTuple):
    """The memory of a value.

    ``where`` is "input", "constant" or "output", and ``at`` its number; or "arena", and ``at`` the offset in bytes; or
    "shared", the memory that ranks share. A part of an input, constant or output, and a value in shared memory, begins
    ``offset`` bytes after the start of the memory.
    """

    where: str
    at: int
    offset: int = 0


def stored_bytes(v: Variable) -> int:
    """The bytes of the array in memory."""
    return v.stored.size * v.type.dtype.itemsize


def overwrites(equation: Equation, argument: Variable, result: Variable) -> bool:
    """Whether ``result`` may overwrite ``argument``: each element is read before it is written."""
    if argument in equation.inputs and not argument.members == result.members == equation.members:
        return False  # what all members share is read for each of them
    if equation.has(Trait.UPDATE):
        return equation.inputs.index(argument) == 0 if argument in equation.inputs else True
    if equation.form in OVERWRITES:
        return OVERWRITES[equation.form](equation, argument, result)
    if has_kernels(equation.form, "cpu") or has_kernels(equation.form, "cuda"):  # a kernel in a file: nothing is known
        return argument not in equation.inputs
    if equation.form and equation.form != LOOPS:
        return read_once(equation, argument, result)
    if argument not in equation.inputs:
        return True
    return by_element(equation) and argument.type == result.type


def read_once(equation: Equation, argument: Variable, result: Variable) -> bool:
    """Whether the equation of a body that computes ``result`` alone reads ``argument``, and may overwrite it."""
    readers = equation.params["body"].readers.get(argument, ())
    if len(readers) == 1 and result in readers[0].outputs:
        return overwrites(readers[0], argument, result)
    return not readers


def of_one_type(equation: Equation, argument: Variable, result: Variable) -> bool:
    return argument.type == result.type


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
                slots.size += aligned_to_cache_line(self.ranks.size * e.inputs[0].nbytes)
        return slots

    def _all_to_all(self, e: Equation, slots: Slots) -> None:
        """The slot of an all-to-all is a matrix. Rank r sends row r, and receives column r."""
        sent, received = self.root[e.inputs[0]], self.root[e.outputs[0]]
        row = e.inputs[0].nbytes
        part = row // self.ranks.size
        if self._free(sent, row):
            self.places[sent] = Place("shared", 0, slots.size + self.ranks.rank * row)
        read = [v for x in self.program.equations if not x.is_view for v in x.inputs if self.root[v] is received]
        inside = part and all(self.offset.get(v, 0) % part + v.nbytes <= part for v in read)
        if self._alone(received, e) and inside and part % ALIGNMENT == 0:
            self.places[received] = Place("shared", 0, slots.size + self.ranks.rank * part)
            found = {v: start for v, start in self.offset.items() if self.root[v] is received}
            self.offset.update({v: start // part * row + start % part for v, start in found.items()})

    def _all_gather(self, number: int, e: Equation, slots: Slots) -> None:
        """The slot of an all-gather is its output."""
        sent, received = self.root[e.inputs[0]], self.root[e.outputs[0]]
        row = e.inputs[0].nbytes
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
        return sent not in self.places and sent.nbytes == row and row % ALIGNMENT == 0

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


@dataclass(frozen=True)
class MemoryPlan:
    """The places of a Program's values.

    Attributes:
        places: of every variable.
        workspaces: for each equation the offset of its scratch memory in the arena.
        arena_bytes: size of the arena.
        separate_bytes: size of the arena's values without sharing.
        in_place: outputs that overwrite a donated input, and that input.
        parts: values whose memory lies inside of another value's.
        slots: of exchanges in the memory that ranks share; None where they share none.
    """

    places: dict[Variable, Place]
    workspaces: tuple[int, ...]
    arena_bytes: int
    separate_bytes: int
    in_place: dict[Variable, Variable]
    parts: frozenset[Variable]
    slots: Slots | None

    @property
    def part_places(self) -> list[Place]:
        """The places in shared memory, and inside of an input, constant or output, after its first byte. Each is listed
        once."""
        return list(dict.fromkeys(place for place in self.places.values() if place.offset))


def no_workspace(equation: Equation) -> int:
    return 0


def plan_memory(
    program: Program,
    workspace: Callable[[Equation], int] = no_workspace,
    guard: int = 0,
    ranks: Communicator | None = None,
) -> MemoryPlan:
    """Plan ``program`` in the order of its equations; ``workspace`` returns the scratch bytes of an equation.

    ``guard`` is the number of bytes before and after each value in the arena that belong to no other value at any time,
    a multiple of the alignment. With ``ranks``, these share memory.
    """
    last_use = {v: i for i, e in enumerate(program.equations) for v in e.inputs}
    last_use |= dict.fromkeys(program.outputs, len(program.equations))
    in_place = _donated(program)
    root, offset = _owners(program, in_place)
    places = {v: Place("input", i) for i, v in enumerate(program.inputs)}
    places |= {v: Place("constant", i) for i, v in enumerate(program.constants)}
    for i, v in enumerate(program.outputs):
        places.setdefault(root[v], Place("output", i))
    slots = None if ranks is None else SlotPlanner(program, ranks, root, offset, places).plan()
    first_write: dict[Variable, int] = {}
    for i, e in enumerate(program.equations):
        for v in e.outputs:
            first_write.setdefault(root[v], i)
    ends: dict[Variable, int] = {}
    for v, r in root.items():
        ends[r] = max(ends.get(r, -1), last_use.get(v, -1))

    _reuse_arguments(program, root, ends, places)

    arena = Arena()
    for i, e in enumerate(program.equations):
        for v in e.outputs:
            if root[v] is v and v not in places:
                lifetime = (0, len(program.equations)) if guard else (first_write[v], max(ends.get(v, i), i))
                arena.add(v, stored_bytes(v) + 2 * guard, *lifetime)
        arena.add(i, workspace(e), i, i)
    offsets = arena.offsets()
    places |= {v: Place("arena", start + guard) for v, start in offsets.items() if isinstance(v, Variable)}
    return MemoryPlan(
        places={v: _at_offset(places[r], offset.get(v, 0)) for v, r in root.items()},
        workspaces=tuple(offsets[i] for i in range(len(program.equations))),
        arena_bytes=arena.size(offsets),
        separate_bytes=sum(request.size for request in arena.requests),
        in_place=in_place,
        parts=frozenset(offset),
        slots=slots,
    )


def _owners(
    program: Program, in_place: dict[Variable, Variable]
) -> tuple[dict[Variable, Variable], dict[Variable, int]]:
    """For each variable the one whose memory it has; for subviews also their first byte in that memory."""
    root: dict[Variable, Variable] = {v: v for v in (*program.inputs, *program.constants)}
    offset: dict[Variable, int] = {}
    for e in program.equations:
        for v in e.outputs:
            root[v] = root[in_place[v]] if v in in_place else v
        if e.is_view and not e.has(Trait.CONCAT_VIEW):
            (out,), x = e.outputs, e.inputs[0]
            root[out] = root[x]
            if x in offset or e.has(Trait.SUBVIEW):
                offset[out] = offset.get(x, 0) + e.params.get("start", 0) * out.type.dtype.itemsize
    for e in program.equations:
        if e.has(Trait.CONCAT_VIEW):
            at = 0
            for x in e.inputs:
                same = [v for v, r in root.items() if r is root[x]]
                root |= dict.fromkeys(same, e.outputs[0])
                offset |= {v: offset.get(v, 0) + at for v in same}
                at += stored_bytes(x)
    return root, offset


def _at_offset(place: Place, offset: int) -> Place:
    """The place `offset` bytes after the start of `place`."""
    return Place("arena", place.at + offset) if place.where == "arena" else place._replace(offset=place.offset + offset)


def pair_donated(program: Program) -> dict[Variable, Variable]:
    """For each output a donated input of the same type, whose memory it could take."""
    free: dict[tuple[ArrayType, int], deque[Variable]] = {}
    for v in program.inputs:
        if v in program.donated:
            free.setdefault((v.type, v.members), deque()).append(v)
    pairs: dict[Variable, Variable] = {}
    for out in dict.fromkeys(program.outputs):
        if same := free.get((out.type, out.members)):
            pairs[out] = same.popleft()
    return pairs


def _donated(program: Program) -> dict[Variable, Variable]:
    """Outputs that overwrite a donated input, which is not read after that."""
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    view_of: dict[Variable, Variable] = {}
    last_use: dict[Variable, int] = {}
    read_by_view: set[tuple[int, Variable]] = set()
    for i, e in enumerate(program.equations):
        if e.is_view and not e.has(Trait.CONCAT_VIEW):
            view_of[e.outputs[0]] = view_of.get(e.inputs[0], e.inputs[0])
        last_use.update((view_of.get(v, v), i) for v in e.inputs)
        read_by_view.update((i, view_of[v]) for v in e.inputs if v in view_of)
    last_use.update((view_of.get(v, v), len(program.equations)) for v in program.outputs)
    found: dict[Variable, Variable] = {}
    for result, donated in pair_donated(program).items():
        out = view_of.get(result, result)
        writer = producer.get(out)
        if writer is None or last_use.get(donated, -1) > writer:
            continue
        if out is not result and not (
            program.equations[writer].has(Trait.COLLECTIVE) and stored_bytes(out) == stored_bytes(result)
        ):
            continue
        if (writer, donated) not in read_by_view and overwrites(program.equations[writer], donated, out):
            found[out] = donated
    return found


def _overwritable(equation: Equation, out: Variable, root: dict[Variable, Variable]) -> list[Variable]:
    """The arguments whose memory `out` may take if it has their type."""
    roots = [root[v] for v in equation.inputs]
    if by_element(equation):
        # They are read at other places.
        parts = {root[v] for v in equation.inputs if stored_bytes(v) != stored_bytes(root[v])}
        return [v for v in equation.inputs if root[v] not in parts]
    if equation.form in OVERWRITES or equation.has(Trait.UPDATE):
        allowed = [v for v in equation.inputs if overwrites(equation, v, out)]
        return [v for v in allowed if roots.count(root[v]) == 1]
    kernels = c_kernels(equation.name) if out.device == "cpu" else ()
    pairs = kernels[0].in_place if len(kernels) == 1 else ()
    allowed = [equation.inputs[argument] for result, argument in pairs if equation.outputs[result] is out]
    return [v for v in allowed if roots.count(root[v]) == 1]


def _reuse_arguments(
    program: Program, root: dict[Variable, Variable], ends: dict[Variable, int], places: dict[Variable, Place]
) -> None:
    """Let results take the memory of an argument that is not read again, where equations or C kernels allow it."""
    sharing: dict[Variable, list[Variable]] = {}  # by the root
    for v, r in root.items():
        sharing.setdefault(r, []).append(v)
    for i, e in enumerate(program.equations):
        for out in e.outputs:
            if root[out] is not out or out in places:
                continue
            for v in _overwritable(e, out, root):
                r = root[v]
                if r not in places and ends[r] == i and v.type == out.type and stored_bytes(r) == stored_bytes(out):
                    moved = sharing.pop(out)
                    root.update(dict.fromkeys(moved, r))
                    sharing[r] += moved
                    ends[r] = max(ends.get(out, i), i)
                    break


@keeps(Results.EXACT)
def place_views(program: Program) -> Program:
    """``program`` with views in place of the slices and concatenations that need no copy.

    All values begin at multiples of ALIGNMENT. A value that the Program returns is not a view, nor is a slice of a
    donated input.
    """
    owner: dict[Variable, Variable] = {}  # for each view, the value whose memory it shares
    for e in program.equations:
        if e.is_view:
            owner[e.outputs[0]] = owner.get(e.inputs[0], e.inputs[0])
    returned = {owner.get(v, v) for v in program.outputs}
    joinable: dict[Variable, Equation] = {}  # values with memory of their own, and what computes them
    equations: list[Equation] = []
    for e in program.equations:
        start = _start(e)
        if start is not None and returned.isdisjoint(e.outputs):
            whole = owner.get(e.inputs[0], e.inputs[0])
            if whole not in program.donated:
                e = replace(e, primitive=subview_p, params={"start": start, "shape": e.outputs[0].type.shape})
                owner[e.outputs[0]] = whole
        elif e.primitive.name == "concatenate" and e.params["axis"] == 0 and returned.isdisjoint(e.outputs):
            parts = [owner.get(v, v) for v in e.inputs]
            makers = [joinable.pop(v, None) for v in parts]  # a value can be a part of one array only
            if _fit(program, e.inputs, parts, makers):
                e = replace(e, primitive=concat_view_p, params={})
        if not e.is_view:
            joinable |= {v: e for v in e.outputs if v not in returned}
        equations.append(e)
    return replace(program, equations=tuple(equations))


def _start(e: Equation) -> int | None:
    """The number of a slice's first element, if the slice is contiguous and begins at an aligned byte; else None."""
    if e.primitive.name != "slice" or set(e.params["steps"]) - {1}:
        return None
    shape, found = e.inputs[0].type.shape, e.outputs[0].type.shape
    cut = [axis for axis, (n, part) in enumerate(zip(shape, found, strict=True)) if n != part]
    if not cut or prod(found[: cut[-1]]) != 1 or not prod(found):
        return None
    start = sum(first * prod(shape[axis + 1 :]) for axis, first in enumerate(e.params["starts"]))
    return None if start * e.inputs[0].type.dtype.itemsize % ALIGNMENT else start


def _fit(
    program: Program, values: Sequence[Variable], owners: Sequence[Variable], makers: Sequence[Equation | None]
) -> bool:
    """Whether values can be computed one after another in memory.

    Each must have all elements of its owner. It must begin at an aligned byte, unless a loop computes it and nothing
    else reads it.
    """
    starts = [0, *accumulate(v.nbytes for v in values)]
    return all(
        e is not None
        and v.nbytes == owner.nbytes
        and (start % ALIGNMENT == 0 or (_by_loop(owner, e) and _read_once(program, v, owner)))
        for v, owner, e, start in zip(values, owners, makers, starts, strict=False)
    )


def _read_once(program: Program, v: Variable, owner: Variable) -> bool:
    """Whether a value, its owner and the views between them have one reader each."""
    x = owner
    while len(program.readers[x]) == 1 and x is not v:
        x = program.readers[x][0].outputs[0]
    return x is v and len(program.readers[v]) == 1


def _by_loop(v: Variable, maker: Equation) -> bool:
    """Whether elementwise code computes `v`. It stores single elements where addresses are not aligned."""
    members = maker.params["body"].equations if maker.form == HORIZONTAL else (maker,)
    return all(is_loops(e) for e in members if v in e.outputs)
