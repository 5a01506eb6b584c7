"""An interpreter of memory plans: it runs a Program on tokens in place of numbers.

It knows nothing of intervals and offsets: it writes down which value lies in which bytes, and looks before each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from adtrain.core.fused import loops_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.arena import ALIGNMENT
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.plan_memory import MemoryPlan, nbytes


class Bytes(NamedTuple):
    """A range of the arena, or all of an input, constant or result."""

    where: str
    start: int
    stop: int

    def touches(self, other: Bytes) -> bool:
        return self.where == other.where and self.start < other.stop and other.start < self.stop


def bytes_of(v: Variable, plan: MemoryPlan) -> Bytes:
    where, at = plan.places[v]
    if where == "arena":
        return Bytes(where, at, at + nbytes(v))
    return Bytes(f"{where} {at}", 0, nbytes(v))


def workspace_of(equation: Equation, plan: MemoryPlan, number: int, sizes: Callable[[Equation], int]) -> list[Bytes]:
    at = plan.workspaces[number]
    return [Bytes("arena", at, at + sizes(equation))]


def assert_plan_holds(program: Program, plan: MemoryPlan, sizes: Callable[[Equation], int]) -> None:
    """Run the Program on tokens: each value has its own, and a reshape has its argument's."""
    content: dict[Bytes, object] = {}
    token: dict[Variable, object] = {}

    def write(place: Bytes, what: object) -> None:
        for other in [b for b in content if b.touches(place)]:
            del content[other]
        content[place] = what

    for v in (*program.inputs, *program.constants):
        token[v] = object()
        write(bytes_of(v, plan), token[v])
    untouched = {bytes_of(v, plan): v for v in (*program.inputs, *program.constants) if v not in program.donated}
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            assert nbytes(v) == 0 or content.get(bytes_of(v, plan)) is token[v], f"{program.names[v]} is gone"
        if e.primitive.name == "reshape":
            assert plan.places[e.outputs[0]] == plan.places[e.inputs[0]]
            token[e.outputs[0]] = token[e.inputs[0]]
            continue
        read, written = ([bytes_of(v, plan) for v in vs] for vs in (e.inputs, e.outputs))
        inside = workspace_of(e, plan, i, sizes)
        assert not any(a.touches(b) for a in inside for b in read + written)
        assert not any(a.touches(b) for k, a in enumerate(written) for b in written[:k])
        if not may_overwrite(e):
            assert not any(a.touches(b) for a in written for b in read)
        assert all(a == b for a in written for b in read if a.touches(b))  # element on element
        for place in inside:
            write(place, "scratch")
        for v, place in zip(e.outputs, written, strict=True):
            assert place not in untouched
            token[v] = object()
            write(place, token[v])
    for v in program.outputs:
        assert nbytes(v) == 0 or content.get(bytes_of(v, plan)) is token[v]
    assert plan.arena_bytes <= plan.separate_bytes
    assert plan.arena_bytes % ALIGNMENT == 0
    assert all(at % ALIGNMENT == 0 for at in plan.workspaces)
    assert all(at % ALIGNMENT == 0 for where, at in plan.places.values() if where == "arena")
    assert all(b.stop <= plan.arena_bytes for b in (bytes_of(v, plan) for v in plan.places) if b.where == "arena")


def may_overwrite(equation: Equation) -> bool:
    """Whether some result takes an element's place when nobody needs the element: what lies in loops, fused or not."""
    body = equation.params.get("body")
    if equation.primitive is loops_p or elementwise(equation):
        return True
    return isinstance(body, Program) and any(map(may_overwrite, body.equations))
