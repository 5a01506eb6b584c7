"""Common subexpression elimination: equal equations are computed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.static_key import params_key


@keeps(Results.EXACT)
def merge_common_subexpressions(program: Program) -> Program:
    """Merge equations of equal primitive, inputs and parameters, and constants of equal elements.

    Arrays that are filled with a value and concatenated, such as the zeros between the parameters of a bucket, stay
    separate: each can be written into the memory of the concatenation (`place_views`).
    """
    same: dict[Variable, Variable] = {}
    constants: dict[Variable, Any] = {}
    by_elements: dict[Any, Variable] = {}
    for v, x in program.constants.items():
        elements = (v.type, v.device, x.numpy().tobytes()) if x.size == 1 else id(x)
        same[v] = by_elements.setdefault(elements, v)
        if same[v] is v:
            constants[v] = x
    equations = []
    known: dict[Any, tuple[Variable, ...]] = {}
    for equation in program.equations:
        equation = equation.renamed_inputs(same)
        separate = equation.primitive.name == "full" and _is_concatenated(program, equation.outputs[0])
        key = None if separate else _key(equation)
        found = equation.outputs if key is None else known.setdefault(key, equation.outputs)
        if found is equation.outputs:
            equations.append(equation)
        else:
            same.update(zip(equation.outputs, found, strict=True))
    outputs = tuple(same.get(v, v) for v in program.outputs)
    return replace(program, constants=constants, equations=tuple(equations), outputs=outputs)


def _key(equation: Equation) -> Hashable | None:
    """What equal equations have in common; None where a parameter is not hashable."""
    try:
        params = params_key(dict(sorted(equation.params.items())))
    except TypeError:
        return None
    return equation.primitive, equation.inputs, params


def _is_concatenated(program: Program, v: Variable) -> bool:
    return any(reader.primitive.name == "concatenate" for reader in program.readers.get(v, ()))
