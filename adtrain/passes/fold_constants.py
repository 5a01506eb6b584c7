"""Constant folding: what depends on constants alone is computed once, when the Program is made."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.array import Array
from adtrain.core.program import Program, Variable
from adtrain.core.trace import EvaluationTrace

MAX_ELEMENTS = 4096
"""Results above this stay equations: a view or a generator costs less than the memory to keep it."""


def fold_constants(program: Program) -> Program:
    """Equations of constants become constants, unless their results are large."""
    constants: dict[Variable, Array] = dict(program.constants)
    equations = []
    for equation in program.equations:
        small = all(v.size <= MAX_ELEMENTS for v in equation.outputs)
        if not equation.inputs or not small or any(v not in constants for v in equation.inputs):
            equations.append(equation)
            continue
        # at once, also where the function that is being staged is part of another one
        inputs = [constants[v] for v in equation.inputs]
        results = EvaluationTrace().process(equation.primitive, inputs, equation.params)
        constants.update(zip(equation.outputs, results if isinstance(results, tuple) else (results,), strict=True))
    return replace(program, constants=constants, equations=tuple(equations))
