"""The memory plan: where each value of a Program lies, worked out before anything runs.

Values that are not alive at the same time share memory in one arena. A reshape is its argument's memory; an elementwise
result takes the place of an argument that nobody needs any more; results take the place of donated inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from adtrain.core.fused import FUSED, loops_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.arena import Arena
from adtrain.passes.fuse_elementwise import elementwise


class Place(NamedTuple):
    """Where a value lies: ``where`` is input, constant or output, and `at` its number there; or arena, at a byte."""

    where: str
    at: int


@dataclass(frozen=True)
class MemoryPlan:
    """The places of a Program's values.

    Attributes:
        places: of every variable.
        workspaces: for each equation the byte in the arena where memory for its own use starts.
        arena_bytes: size of the arena.
        separate_bytes: what the arena's values would take with memory of their own until the end.
        in_place: outputs that lie in a donated input.
    """

    places: dict[Variable, Place]
    workspaces: tuple[int, ...]
    arena_bytes: int
    separate_bytes: int
    in_place: dict[Variable, Variable]


def nbytes(v: Variable) -> int:
    return v.size * v.type.dtype.itemsize


def no_workspace(equation: Equation) -> int:
    return 0


def plan_memory(program: Program, workspace: Callable[[Equation], int] = no_workspace) -> MemoryPlan:
    """Plan ``program`` as its equations stand; ``workspace`` gives the bytes that an equation needs for itself."""
    last_use = {v: i for i, e in enumerate(program.equations) for v in e.inputs}
    last_use |= dict.fromkeys(program.outputs, len(program.equations))
    root: dict[Variable, Variable] = {v: v for v in (*program.inputs, *program.constants)}
    in_place = _donated(program)
    for e in program.equations:
        for v in e.outputs:
            root[v] = v
        if e.primitive.name == "reshape":
            root[e.outputs[0]] = root[e.inputs[0]]
        for v in e.outputs:
            if v in in_place:
                root[v] = root[in_place[v]]
    ends: dict[Variable, int] = {}
    for v, r in root.items():
        ends[r] = max(ends.get(r, -1), last_use.get(v, -1))

    places = {v: Place("input", i) for i, v in enumerate(program.inputs)}
    places |= {v: Place("constant", i) for i, v in enumerate(program.constants)}
    for i, v in enumerate(program.outputs):
        places.setdefault(root[v], Place("output", i))
    _reuse_arguments(program, root, ends, places)

    arena = Arena()
    for i, e in enumerate(program.equations):
        for v in e.outputs:
            if root[v] is v and v not in places:
                arena.add(v, nbytes(v), i, max(ends.get(v, i), i))
        arena.add(i, workspace(e), i, i)
    offsets = arena.offsets()
    places |= {v: Place("arena", offset) for v, offset in offsets.items() if isinstance(v, Variable)}
    return MemoryPlan(
        places={v: places[r] for v, r in root.items()},
        workspaces=tuple(offsets[i] for i in range(len(program.equations))),
        arena_bytes=arena.size(offsets),
        separate_bytes=sum(request.size for request in arena.requests),
        in_place=in_place,
    )


def pair_donated(program: Program) -> dict[Variable, Variable]:
    """For each output the donated input whose memory it could take: the first unused one of the same type."""
    free = [v for v in program.inputs if v in program.donated]
    pairs: dict[Variable, Variable] = {}
    for out in dict.fromkeys(program.outputs):
        match = next((v for v in free if v.type == out.type), None)
        if match is not None:
            free.remove(match)
            pairs[out] = match
    return pairs


def _donated(program: Program) -> dict[Variable, Variable]:
    """Outputs that are written over a donated input, because nobody needs its elements any more by then."""
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    view_of: dict[Variable, Variable] = {}
    last_use: dict[Variable, int] = {}
    for i, e in enumerate(program.equations):
        if e.primitive.name == "reshape":
            view_of[e.outputs[0]] = view_of.get(e.inputs[0], e.inputs[0])
        last_use.update((view_of.get(v, v), i) for v in e.inputs)
    last_use.update((view_of.get(v, v), len(program.equations)) for v in program.outputs)
    found: dict[Variable, Variable] = {}
    for out, donated in pair_donated(program).items():
        writer = producer.get(out)
        if writer is None or out in view_of or last_use.get(donated, -1) > writer:
            continue
        equation = program.equations[writer]
        viewed = any(view_of.get(v) is donated for v in equation.inputs)
        if not viewed and overwrites(equation, donated, out):
            found[out] = donated
    return found


def overwrites(equation: Equation, argument: Variable, result: Variable) -> bool:
    """Whether ``result`` may be written where ``argument`` lies: each element is read before it is written."""
    if argument not in equation.inputs:
        return True
    if equation.primitive in FUSED and equation.primitive is not loops_p:
        body: Program = equation.params["body"]
        # a body names its variables as the equation does
        readers = [e for e in body.equations if argument in e.inputs]
        return len(readers) == 1 and result in readers[0].outputs and overwrites(readers[0], argument, result)
    return (elementwise(equation) or equation.primitive is loops_p) and argument.type == result.type


def _reuse_arguments(
    program: Program, root: dict[Variable, Variable], ends: dict[Variable, int], places: dict[Variable, Place]
) -> None:
    """Let results of elementwise equations take the memory of an argument that ends there."""
    for i, e in enumerate(program.equations):
        if not (elementwise(e) or e.primitive is loops_p):
            continue
        for out in e.outputs:
            if root[out] is not out or out in places:
                continue
            for v in e.inputs:
                r = root[v]
                if r not in places and ends[r] == i and v.type == out.type and nbytes(r) == nbytes(out):
                    for other, its_root in root.items():
                        if its_root is out:
                            root[other] = r
                    ends[r] = max(ends.get(out, i), i)
                    break
