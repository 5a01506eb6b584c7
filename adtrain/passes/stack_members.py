"""Compute equations of a Program by member by the batching rules of their primitives, where no kernel has members.

Such an equation becomes the equations of the rule, on arrays with the members along axis 0. Views lead from the mapped
values to these arrays, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from adtrain.core.primitive import Primitive, Trait
from adtrain.core.program import Equation, Program, Variable, renamed
from adtrain.core.staging import Pass, Results, StagingTrace, keeps
from adtrain.core.trace import at, base_trace, bind
from adtrain.core.views import split_members_p, stack_members_p
from adtrain.core.vmap import batching_rule


def stack_members(
    program: Program,
    stays: Callable[[Equation], bool],
    rule_of: Callable[[Primitive], Callable[..., object]] = batching_rule,
    passes: Sequence[Pass] = (),
) -> Program:
    """``program`` in which batching rules compute some of the equations of members.

    Args:
        stays: whether an equation remains as it is.
        rule_of: the batching rule of a primitive.
        passes: for the equations of one rule.
    """
    equations: list[Equation] = []
    constants = dict(program.constants)
    stacked: dict[Variable, Variable] = {}  # for a mapped value, the array with the members along axis 0

    def array(v: Variable) -> Variable:
        if v.members and v not in stacked:
            stacked[v] = Variable(v.stored, v.device)
            equations.append(Equation(stack_members_p, (v,), {"members": v.members}, (stacked[v],)))
        return stacked.get(v, v)

    for e in program.equations:
        if e.primitive is split_members_p:
            stacked[e.outputs[0]] = e.inputs[0]
        if not e.members or e.has(Trait.MEMBERS) or stays(e):
            equations.append(e)
            continue
        found = _batched(e, [array(v) for v in e.inputs], rule_of(e.primitive))
        for apply in passes:
            found = apply(found)
        equations += found.equations
        constants |= found.constants
        for v, x in zip(e.outputs, found.outputs, strict=True):
            stacked[v] = x
            equations.append(Equation(split_members_p, (x,), {}, (v,), e.scope, e.phase))
    return replace(program, constants=constants, equations=tuple(equations))


@keeps(Results.ROUNDING)
def stack_all_members(program: Program) -> Program:
    """``program`` computed by batching rules alone: no variable is mapped."""
    found = stack_members(program, stays=lambda e: False)
    names = {v: Variable(v.stored, v.device) for v in program.inputs if v.members}
    equations: list[Equation] = []
    for e in found.equations:
        if e.has(Trait.MEMBERS):
            names[e.outputs[0]] = names.get(e.inputs[0], e.inputs[0])
        else:
            equations.append(renamed(e, names))
    inputs, outputs, donated = (
        tuple(names.get(v, v) for v in group) for group in (found.inputs, found.outputs, found.donated_inputs)
    )
    return Program(inputs, found.constants, tuple(equations), outputs, frozenset(donated))


def _batched(equation: Equation, inputs: Sequence[Variable], rule: Callable[..., object]) -> Program:
    """The equations of a batching rule, on ``inputs``."""
    trace = StagingTrace()
    symbols = {v: trace.known(v) for v in dict.fromkeys(inputs)}
    mapped = tuple(v.members > 0 for v in equation.inputs)
    try:
        with base_trace(trace), at(equation.scope, equation.phase):
            op = partial(bind, equation.primitive)
            results = rule(op, mapped, *(symbols[v] for v in inputs), **equation.params)
    finally:
        trace.live = False
    return trace.program(results if isinstance(results, tuple) else (results,))
