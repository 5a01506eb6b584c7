"""Replace each `per_member` equation by equations that compute all members.

The body of a `per_member` equation is fused as the Program of one member. Each of its equations that a generated kernel
computes then becomes a `per_member` equation of its own, whose kernel has the members as a dimension of its grid. So
neither the kernel nor the member's bytes depend on the number of members. Any other equation is replaced by the
equations of its primitive's batching rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from adtrain.core.array import Array
from adtrain.core.batching import batching_rule
from adtrain.core.batching_rules import loop
from adtrain.core.fused import per_member_p, renamed
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.scope import at
from adtrain.core.staging import Pass, Results, keeps
from adtrain.core.staging_trace import StagingTrace
from adtrain.core.trace import base_trace, bind
from adtrain.core.types import ArrayType


@keeps(Results.ROUNDING)
def distribute_members(program: Program, fusions: Sequence[Pass], generated: Callable[[Equation], bool]) -> Program:
    """``program`` with the equations of the fused bodies in place of its `per_member` equations.

    Args:
        fusions: the passes for the Program of one member.
        generated: whether a generated kernel computes an equation.
    """
    equations: list[Equation] = []
    constants = dict(program.constants)
    names: dict[Variable, Variable] = {}
    for e in program.equations:
        if e.primitive is not per_member_p:
            equations.append(renamed(e, names))
            continue
        body = e.params["body"]
        for apply in fusions:
            body = apply(body)
        replacement, results = _with_members(renamed(e, names), body, generated, constants)
        equations += replacement
        names.update(zip(e.outputs, results, strict=True))
    outputs = tuple(names.get(v, v) for v in program.outputs)
    return replace(program, constants=constants, equations=tuple(equations), outputs=outputs)


def _with_members(
    equation: Equation, body: Program, generated: Callable[[Equation], bool], constants: dict[Variable, Array]
) -> tuple[list[Equation], list[Variable]]:
    """The equations that compute all members, and the results. Adds their constants to ``constants``."""
    count, flags = equation.params["count"], equation.params["mapped"]
    # For each variable of the body, the variable with the values of all members, or with their common value.
    stacked = dict(zip(body.inputs, equation.inputs, strict=True)) | {v: v for v in body.constants}
    constants |= body.constants
    differs = {v for v, flag in zip(body.inputs, flags, strict=True) if flag}  # between members
    equations: list[Equation] = []
    for e in body.equations:
        mapped = tuple(v in differs for v in e.inputs)
        inputs = tuple(stacked[v] for v in e.inputs)
        if not any(mapped):
            equations.append(renamed(e, stacked))
            stacked.update(zip(e.outputs, e.outputs, strict=True))
            continue
        differs.update(e.outputs)
        if generated(e) or e.has(Trait.RESHAPE):
            outputs = tuple(_of_all_members(v, count) for v in e.outputs)
            stacked.update(zip(e.outputs, outputs, strict=True))
            if e.has(Trait.RESHAPE):
                shape = outputs[0].type.shape
                equations.append(replace(e, inputs=inputs, outputs=outputs, params={**e.params, "shape": shape}))
                continue
            distinct = dict(zip(e.inputs, mapped, strict=True))
            member = Program(tuple(distinct), {}, (e,), e.outputs)
            params = {"body": member, "count": count, "mapped": tuple(distinct.values())}
            inputs = tuple(stacked[v] for v in distinct)
            equations.append(replace(e, primitive=per_member_p, inputs=inputs, outputs=outputs, params=params))
        else:
            batched = _batched(e, inputs, mapped)
            equations += batched.equations
            constants |= batched.constants
            stacked.update(zip(e.outputs, batched.outputs, strict=True))
    results = []
    for v in body.outputs:
        if v not in differs:
            shape, result = (count, *v.type.shape), _of_all_members(v, count)
            equations.append(Equation(PRIMITIVES["broadcast_to"], (stacked[v],), {"shape": shape}, (result,)))
            results.append(result)
        else:
            results.append(stacked[v])
    return equations, results


def _of_all_members(v: Variable, count: int) -> Variable:
    return Variable(ArrayType((count, *v.type.shape), v.type.dtype), v.device)


def _batched(equation: Equation, inputs: Sequence[Variable], mapped: tuple[bool, ...]) -> Program:
    """The equations of the batching rule of an equation's primitive, on ``inputs``. Recurrent networks run one after
    another: by their rule, the sequences of members that share the weights would be those of one network."""
    trace = StagingTrace()
    symbols = {v: trace.known(v) for v in dict.fromkeys(inputs)}
    try:
        with base_trace(trace), at(equation.scope, equation.phase):
            primitive = equation.primitive
            rule = loop if equation.has(Trait.RECURRENT) else batching_rule(primitive)
            results = rule(partial(bind, primitive), mapped, *(symbols[v] for v in inputs), **equation.params)
    finally:
        trace.live = False
    return trace.program(results if isinstance(results, tuple) else (results,))
