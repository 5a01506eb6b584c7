"""An interpreter that checks memory plans: it runs a Program on tokens instead of arrays.

It records which value is in which bytes, and checks before each use that the value is still there.
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
    where, at, _ = plan.places[v]
    if where == "arena":
        return Bytes(where, at, at + nbytes(v))
    return Bytes(f"{where} {at}", 0, nbytes(v))


def workspace_of(equation: Equation, plan: MemoryPlan, number: int, sizes: Callable[[Equation], int]) -> list[Bytes]:
    at = plan.workspaces[number]
    return [Bytes("arena", at, at + sizes(equation))]


def assert_plan_holds(program: Program, plan: MemoryPlan, sizes: Callable[[Equation], int]) -> None:
    """Run the Program on tokens. Each value has a token of its own; a reshape has that of its argument.

    Raises:
        AssertionError: a value is overwritten before its last use, or a limit of the plan is wrong.
    """
    content: dict[Bytes, object] = {}
    token: dict[Variable, object] = {}

    def write(place: Bytes, value: object) -> None:
        for other in [b for b in content if b.touches(place)]:
            del content[other]
        content[place] = value

    for v in (*program.inputs, *program.constants):
        token[v] = object()
        write(bytes_of(v, plan), token[v])
    untouched = {bytes_of(v, plan): v for v in (*program.inputs, *program.constants) if v not in program.donated}
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            assert nbytes(v) == 0 or content.get(bytes_of(v, plan)) is token[v], f"{program.names[v]} was overwritten"
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
        assert all(
            a == b for a in written for b in read if a.touches(b)
        )  # each element overwrites the element that it is computed from
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
    assert all(at % ALIGNMENT == 0 for where, at, _ in plan.places.values() if where == "arena")
    assert all(b.stop <= plan.arena_bytes for b in (bytes_of(v, plan) for v in plan.places) if b.where == "arena")


def may_overwrite(equation: Equation) -> bool:
    """Whether a result may overwrite an argument: an elementwise equation, or a fused one that contains one."""
    body = equation.params.get("body")
    if equation.primitive is loops_p or elementwise(equation):
        return True
    return isinstance(body, Program) and any(map(may_overwrite, body.equations))
