"""Dead code: equations and constants that no output depends on."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.program import Program, Variable


def remove_dead_code(program: Program) -> Program:
    """The equations that the outputs depend on, in their order."""
    needed: set[Variable] = set(program.outputs)
    kept = []
    for equation in reversed(program.equations):
        if not needed.isdisjoint(equation.outputs):
            kept.append(equation)
            needed.update(equation.inputs)
    constants = {v: x for v, x in program.constants.items() if v in needed}
    return replace(program, constants=constants, equations=tuple(reversed(kept)))
