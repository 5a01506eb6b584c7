"""Passes that remove work without changing any bit of the results."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from adtrain.core.array import Array
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.static_key import params_key
from adtrain.core.trace import EvaluationTrace


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


@keeps(Results.EXACT)
def fold_collectives(program: Program) -> Program:
    """``program`` with a reshape in place of each exchange between one rank or one shard only."""
    return replace(program, equations=tuple(_folded(e) for e in program.equations))


def _folded(e: Equation) -> Equation:
    one_rank = e.has(Trait.COLLECTIVE) and e.params["ranks"] == 1
    one_shard = e.has(Trait.SHARD_EXCHANGE) and e.params["shards"] == 1
    if not (one_rank or one_shard):
        return e
    return replace(e, primitive=PRIMITIVES["reshape"], params={"shape": e.outputs[0].type.shape})


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


def reshape_equation(like: Equation, x: Variable, out: Variable) -> Equation:
    """The reshape of ``x`` to ``out``, with the scope and phase of another equation."""
    return Equation(PRIMITIVES["reshape"], (x,), {"shape": out.type.shape}, (out,), like.scope, like.phase)


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
        key = None if separate else _equal_key(equation)
        found = equation.outputs if key is None else known.setdefault(key, equation.outputs)
        if found is equation.outputs:
            equations.append(equation)
        else:
            same.update(zip(equation.outputs, found, strict=True))
    outputs = tuple(same.get(v, v) for v in program.outputs)
    return replace(program, constants=constants, equations=tuple(equations), outputs=outputs)


def _equal_key(equation: Equation) -> Hashable | None:
    """What equal equations have in common; None where a parameter is not hashable."""
    try:
        params = params_key(dict(sorted(equation.params.items())))
    except TypeError:
        return None
    return equation.primitive, equation.inputs, params


def _is_concatenated(program: Program, v: Variable) -> bool:
    return any(reader.primitive.name == "concatenate" for reader in program.readers.get(v, ()))
