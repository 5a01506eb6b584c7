"""Constant folding: equations on constants are computed once, when the Program is made."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.array import Array
from adtrain.core.primitive import Trait
from adtrain.core.program import Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.trace import EvaluationTrace

MAX_ELEMENTS = 4096
"""Larger results stay equations: recomputing them costs less than the memory to store them."""


@keeps(Results.EXACT)
def fold_constants(program: Program) -> Program:
    """Replace equations whose inputs are all constants by constants, unless the results are large.

    Broadcasts stay in a Program by member: its kernels for a first layer take single numbers (`resident_layer`).
    """
    constants: dict[Variable, Array] = dict(program.constants)
    equations = []
    for equation in program.equations:
        small = all(v.size <= MAX_ELEMENTS for v in equation.outputs)
        stays = equation.has(Trait.COLLECTIVE) or (program.members > 0 and equation.has(Trait.BROADCAST))
        if not equation.inputs or stays or not small or any(v not in constants for v in equation.inputs):
            equations.append(equation)
            continue
        # Computed now, even inside the tracing of another function.
        inputs = [constants[v] for v in equation.inputs]
        results = EvaluationTrace().process(equation.primitive, inputs, equation.params)
        constants.update(zip(equation.outputs, results if isinstance(results, tuple) else (results,), strict=True))
    return replace(program, constants=constants, equations=tuple(equations))
