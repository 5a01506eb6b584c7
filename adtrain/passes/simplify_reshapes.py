"""Simplify reshapes: a reshape of a reshape is one reshape, and a reshape to the same shape is removed."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps


@keeps(Results.EXACT)
def simplify_reshapes(program: Program) -> Program:
    """``program`` without reshapes of reshapes and without reshapes to the same shape."""
    source: dict[Variable, Variable] = {}  # of a reshape: the value before all reshapes
    same: dict[Variable, Variable] = {}
    equations: list[Equation] = []
    for e in program.equations:
        e = e.renamed_inputs(same)
        if e.has(Trait.RESHAPE):
            (x,), (out,) = e.inputs, e.outputs
            source[out] = source.get(x, x)
            if source[out].type == out.type:
                same[out] = source[out]
                continue
            e = e.renamed_inputs({x: source[out]})
        equations.append(e)
    return replace(program, equations=tuple(equations), outputs=tuple(same.get(v, v) for v in program.outputs))
