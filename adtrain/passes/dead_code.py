"""Dead code elimination."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.program import Program, Variable
from adtrain.core.staging import Results, keeps


@keeps(Results.EXACT)
def remove_dead_code(program: Program) -> Program:
    """``program`` without equations and constants that no output depends on."""
    needed: set[Variable] = set(program.outputs)
    used = []
    for equation in reversed(program.equations):
        if not needed.isdisjoint(equation.outputs):
            used.append(equation)
            needed.update(equation.inputs)
    constants = {v: x for v, x in program.constants.items() if v in needed}
    return replace(program, constants=constants, equations=tuple(reversed(used)))
