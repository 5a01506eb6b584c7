"""Elementwise fusion: a chain of elementwise equations becomes one loop nest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from adtrain.core.fused import fuse, gather_p, loops_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.groups import Groups

SPREADING = ("broadcast_to", "full")
"""Primitives that a loop nest replaces by the way it reads: each reader gets its own, so that none is stored."""


def elementwise(equation: Equation) -> bool:
    """Whether an equation is a C expression of the elements of its arguments."""
    return equation.primitive.expression is not None or equation.primitive.name in SPREADING


def is_loops(equation: Equation) -> bool:
    """Whether a GPU computes it by loops, whose results are the same whatever shares their launch."""
    return equation.primitive in (loops_p, gather_p) or elementwise(equation)


def fuse_elementwise(program: Program) -> Program:
    """One `loops` equation for each connected group of elementwise equations of one shape and phase."""
    program = _own_broadcasts(program)
    groups = Groups(program)
    for i, e in enumerate(program.equations):
        if not elementwise(e):
            continue
        for v in e.inputs:
            p = groups.producer.get(v)
            if p is None:
                continue
            source = program.equations[p]
            alike = source.outputs[0].type.shape == e.outputs[0].type.shape and source.phase == e.phase
            if elementwise(source) and alike and groups.can_merge(groups.of[p], groups.of[i]):
                groups.merge(groups.of[p], groups.of[i])
    return groups.rewritten(partial(fuse, loops_p))


def _own_broadcasts(program: Program) -> Program:
    """Each elementwise reader of a broadcast gets a copy of it."""
    spread = {v: e for e in program.equations if e.primitive.name in SPREADING for v in e.outputs}
    equations: list[Equation] = []
    needed = set(program.outputs)
    for e in program.equations:
        if elementwise(e) and e.primitive.name not in SPREADING:
            copies: dict[Variable, Variable] = {}
            for v in e.inputs:
                if v in spread and v not in copies:
                    copies[v] = Variable(v.type, v.device)
                    equations.append(replace(spread[v], outputs=(copies[v],), scope=e.scope, phase=e.phase))
            e = replace(e, inputs=tuple(copies.get(v, v) for v in e.inputs))
        equations.append(e)
        needed.update(e.inputs)
    kept = tuple(e for e in equations if e.primitive.name not in SPREADING or not needed.isdisjoint(e.outputs))
    return replace(program, equations=kept)
