"""An interpreter that checks memory plans: it runs a Program on tags instead of numbers.

Each byte of a computed value has a tag of its own. A view has the tags of its argument. Before an equation reads a
value, the memory at the value's place must hold the value's tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adtrain.core.kernel import c_kernels
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fusion import by_element
from adtrain.passes.plan_memory import ALIGNMENT, MemoryPlan


class Bytes(NamedTuple):
    """A range of bytes of the arena, or of an input, constant or result."""

    where: str
    start: int
    stop: int

    def touches(self, other: Bytes) -> bool:
        return self.where == other.where and self.start < other.stop and other.start < self.stop


def bytes_of(v: Variable, plan: MemoryPlan) -> Bytes:
    where, at, offset = plan.places[v]
    if where == "arena":
        return Bytes(where, at, at + v.nbytes)
    return Bytes(f"{where} {at}", offset, offset + v.nbytes)


def workspace_of(equation: Equation, plan: MemoryPlan, number: int, sizes: Callable[[Equation], int]) -> list[Bytes]:
    at = plan.workspaces[number]
    return [Bytes("arena", at, at + sizes(equation))]


class Memory:
    """The tag of each byte in the arena, inputs, constants and results, and the tags that each value should have."""

    def __init__(self, program: Program, plan: MemoryPlan) -> None:
        self.plan = plan
        self.blocks = {"arena": np.zeros(plan.arena_bytes, np.int64)}  # 0: no value
        for where, values in (("input", program.inputs), ("constant", program.constants), ("output", program.outputs)):
            self.blocks |= {f"{where} {i}": np.zeros(v.nbytes, np.int64) for i, v in enumerate(values)}
        self.tags: dict[Variable, np.ndarray] = {}
        self.next_tag = 1

    def at(self, place: Bytes) -> np.ndarray:
        """The tags in a range of bytes, which can be overwritten."""
        assert place.stop <= self.blocks[place.where].size
        return self.blocks[place.where][place.start : place.stop]

    def write(self, v: Variable) -> None:
        """Compute a value: new tags at its place."""
        self.tags[v] = np.arange(self.next_tag, self.next_tag + v.nbytes)
        self.next_tag += v.nbytes
        self.at(bytes_of(v, self.plan))[:] = self.tags[v]

    def view(self, e: Equation) -> None:
        """Derive the tags of a view from those of its arguments. No memory changes."""
        (out,) = e.outputs
        start = e.params.get("start", 0) * out.type.dtype.itemsize
        self.tags[out] = np.concatenate([self.tags[v] for v in e.inputs])[start : start + out.nbytes]

    def holds(self, v: Variable) -> bool:
        """Whether the value is at its place."""
        return np.array_equal(self.at(bytes_of(v, self.plan)), self.tags[v])


def assert_plan_holds(program: Program, plan: MemoryPlan, sizes: Callable[[Equation], int]) -> None:
    """Run the Program on tags.

    Raises:
        AssertionError: a value is overwritten before its last use, a view is not at the place of its elements, or a
            limit of the plan is wrong.
    """
    memory = Memory(program, plan)
    for v in (*program.inputs, *program.constants):
        memory.write(v)
    untouched = [bytes_of(v, plan) for v in (*program.inputs, *program.constants) if v not in program.donated]
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            assert memory.holds(v), f"{program.names[v]} was overwritten"
        if e.is_view:
            memory.view(e)
            assert memory.holds(e.outputs[0]), f"{program.names[e.outputs[0]]} is not where its elements are"
            continue
        read, written = ([bytes_of(v, plan) for v in vs] for vs in (e.inputs, e.outputs))
        inside = workspace_of(e, plan, i, sizes)
        assert not any(a.touches(b) for a in inside for b in read + written)
        assert not any(a.touches(b) for k, a in enumerate(written) for b in written[:k])
        assert not any(a.touches(b) for a in written for b in untouched)
        if not may_overwrite(e):
            assert not any(a.touches(b) for a in written for b in read)
        assert all(
            a == b for a in written for b in read if a.touches(b)
        )  # each element overwrites the element that it is computed from
        for place in inside:
            memory.at(place)[:] = 0
        for v in e.outputs:
            memory.write(v)
    assert all(map(memory.holds, program.outputs))
    assert plan.arena_bytes <= plan.separate_bytes
    assert plan.arena_bytes % ALIGNMENT == 0
    assert all(at % ALIGNMENT == 0 for at in plan.workspaces)
    whole = [place for v, place in plan.places.items() if v not in plan.parts]
    assert all(at % ALIGNMENT == 0 for where, at, _ in whole if where == "arena")


def may_overwrite(equation: Equation) -> bool:
    """Whether a result may overwrite an argument: the equation, or one inside of a fused one, is elementwise or an
    update, or has a C kernel that allows it."""
    body = equation.params.get("body")
    if by_element(equation) or equation.has(Trait.UPDATE):
        return True
    if any(kernel.in_place for kernel in c_kernels(equation.name)):
        return equation.outputs[0].device == "cpu"
    return isinstance(body, Program) and any(map(may_overwrite, body.equations))
