"""Elementwise fusion: connected elementwise equations become one loop nest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from adtrain.core.fused import GATHER, LOOPS, fuse
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.groups import MAX_EQUATIONS, Groups


def elementwise(equation: Equation) -> bool:
    """Whether an equation is a C expression of the elements of its arguments, or a broadcast of them."""
    return equation.primitive.expression is not None or equation.has(Trait.BROADCAST)


def by_element(equation: Equation) -> bool:
    """Whether it computes element by element: one elementwise operation, or a loop of several."""
    return equation.form == LOOPS or elementwise(equation)


def is_loops(equation: Equation) -> bool:
    """Whether a GPU computes it by a generated loop nest."""
    return equation.form in (LOOPS, GATHER) or elementwise(equation)


def fuse_elementwise(program: Program) -> Program:
    """One `loops` equation for each connected group of elementwise equations of one shape and phase."""
    program = _copy_broadcasts(program)
    groups = Groups(program, MAX_EQUATIONS)
    for i, e in enumerate(program.equations):
        if not elementwise(e) or e.has(Trait.WIDENING):
            continue
        for v in e.inputs:
            p = groups.producer.get(v)
            if p is None:
                continue
            source = program.equations[p]
            alike = source.outputs[0].type.shape == e.outputs[0].type.shape and source.phase == e.phase
            if elementwise(source) and alike and groups.can_merge(groups.of[p], groups.of[i]):
                groups.merge(groups.of[p], groups.of[i])
    return groups.rewritten(partial(fuse, LOOPS))


def _copy_broadcasts(program: Program) -> Program:
    """Give each elementwise reader of a broadcast a copy of it, so that no broadcast is stored for several readers."""
    broadcasts = {v: e for e in program.equations if e.has(Trait.BROADCAST) for v in e.outputs}
    equations: list[Equation] = []
    needed = set(program.outputs)
    for e in program.equations:
        if elementwise(e) and not e.has(Trait.BROADCAST):
            copies: dict[Variable, Variable] = {}
            for v in e.inputs:
                if v in broadcasts and v not in copies:
                    copies[v] = Variable(v.type, v.device)
                    equations.append(replace(broadcasts[v], outputs=(copies[v],), scope=e.scope, phase=e.phase))
            e = replace(e, inputs=tuple(copies.get(v, v) for v in e.inputs))
        equations.append(e)
        needed.update(e.inputs)
    used = tuple(e for e in equations if not e.has(Trait.BROADCAST) or not needed.isdisjoint(e.outputs))
    return replace(program, equations=used)
