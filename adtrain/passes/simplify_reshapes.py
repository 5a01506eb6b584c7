"""Reshapes: of a reshape only the last shape counts, and one that changes nothing is its argument."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.program import Equation, Program, Variable


def simplify_reshapes(program: Program) -> Program:
    """No reshape of a reshape, and none to the shape that is there already."""
    of: dict[Variable, Variable] = {}  # what a reshape's result has the elements of
    same: dict[Variable, Variable] = {}
    equations: list[Equation] = []
    for e in program.equations:
        e = replace(e, inputs=tuple(same.get(v, v) for v in e.inputs))
        if e.primitive.name == "reshape":
            (x,), (out,) = e.inputs, e.outputs
            of[out] = of.get(x, x)
            if of[out].type == out.type:
                same[out] = of[out]
                continue
            e = replace(e, inputs=(of[out],))
        equations.append(e)
    return replace(program, equations=tuple(equations), outputs=tuple(same.get(v, v) for v in program.outputs))
