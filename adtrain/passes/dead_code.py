"""Dead code elimination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps


def needed_for(results: Iterable[Variable], equations: Sequence[Equation]) -> list[Equation]:
    """The equations on which the results depend, in their order."""
    needed, found = set(results), list[Equation]()
    for e in reversed(equations):
        if not needed.isdisjoint(e.outputs):
            found.append(e)
            needed.update(e.inputs)
    return found[::-1]


@keeps(Results.EXACT)
def remove_dead_code(program: Program) -> Program:
    """``program`` without equations and constants that no output depends on."""
    equations = needed_for(program.outputs, program.equations)
    read = {*program.outputs, *(v for e in equations for v in e.inputs)}
    constants = {v: x for v, x in program.constants.items() if v in read}
    return replace(program, constants=constants, equations=tuple(equations))
