"""Derivatives of activations are computed in the forward phase, where they take the place of the activation's argument.

Backward often reads the argument of an activation only for the derivative. The forward phase can then store the derivative
instead, in the same loop that computes the activation: the two share parts, such as the exponential of gelu.
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.program import Program, Variable
from adtrain.passes.fuse_elementwise import elementwise


def keep_derivatives(program: Program) -> Program:
    """Give an elementwise function of one value the value's phase, where no other equation of a later phase reads it."""
    producer = {v: e for e in program.equations for v in e.outputs}
    readers: dict[Variable, int] = dict.fromkeys(program.outputs, 2)
    """The number of equations of later phases that read a value."""
    for e in program.equations:
        for v in e.inputs:
            if v in producer and producer[v].phase != e.phase:
                readers[v] = readers.get(v, 0) + 1
    equations = []
    for e in program.equations:
        if elementwise(e) and len(e.inputs) == 1 and readers.get(x := e.inputs[0]) == 1 and elementwise(producer[x]):
            e = replace(e, phase=producer[x].phase)
        equations.append(e)
    return replace(program, equations=tuple(equations))
