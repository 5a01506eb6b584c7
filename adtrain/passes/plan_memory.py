"""The memory plan: where each value of a Program is stored, computed before anything runs.

Values that are not alive at the same time share memory in one arena. A reshape has its argument's memory, and a
subview a part of it. The arguments of a concat view are computed in the memory of its output (`core.views`).
Elementwise results, and those of C kernels that allow it, take the memory of an argument that is not read again.
Results take the memory of donated inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from adtrain.core.communicator import Communicator
from adtrain.core.kernel import c_kernels
from adtrain.core.primitive import Trait
from adtrain.core.program import OVERWRITES, Equation, Program, Variable
from adtrain.core.types import ArrayType
from adtrain.passes.arena import Arena
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.place_exchanges import SlotPlanner, Slots
from adtrain.passes.places import Place, overwrites, stored_bytes


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

    With ``guard``, a multiple of the alignment, so many bytes before and after each value in the arena belong to no
    other value at any time. With ``ranks``, these share memory.
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
