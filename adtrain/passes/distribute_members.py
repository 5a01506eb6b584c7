"""Replace each `mapped` equation by equations that compute all members.

The body of a `mapped` equation is fused as the Program of one member. Each of its equations that a generated kernel
computes then becomes a `mapped` equation of its own, whose kernel has the members as a dimension of its grid. So
neither the kernel nor the member's bytes depend on the number of members. Any other equation is replaced by the
equations of its primitive's batching rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from adtrain.core.array import Array
from adtrain.core.batching import batching_rule
from adtrain.core.fused import fuse, horizontal_p, loops_p, mapped_p, renamed
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.scope import at
from adtrain.core.staging import Pass
from adtrain.core.staging_trace import StagingTrace
from adtrain.core.trace import base_trace, bind
from adtrain.core.types import ArrayType
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.fuse_one_block import BY_INDEX, is_small
from adtrain.passes.groups import Groups


def distribute_members(program: Program, fusions: Sequence[Pass], generated: Callable[[Equation], bool]) -> Program:
    """``program`` with the equations of the fused bodies in place of its `mapped` equations.

    Args:
        fusions: the passes for the Program of one member.
        generated: whether a generated kernel computes an equation.
    """
    equations: list[Equation] = []
    constants = dict(program.constants)
    names: dict[Variable, Variable] = {}
    for e in program.equations:
        if e.primitive is not mapped_p:
            equations.append(renamed(e, names))
            continue
        body = e.params["body"]
        for apply in fusions:
            body = apply(body)
        found, results = _with_members(renamed(e, names), body, generated, constants)
        equations += found
        names.update(zip(e.outputs, results, strict=True))
    outputs = tuple(names.get(v, v) for v in program.outputs)
    return replace(program, constants=constants, equations=tuple(equations), outputs=outputs)


def _with_members(
    mapped: Equation, body: Program, generated: Callable[[Equation], bool], constants: dict[Variable, Array]
) -> tuple[list[Equation], list[Variable]]:
    """The equations that compute all members, and the results. Adds their constants to ``constants``."""
    count, flags = mapped.params["count"], mapped.params["mapped"]
    of = dict(zip(body.inputs, mapped.inputs, strict=True)) | {v: v for v in body.constants}
    constants |= body.constants
    members = {v for v, flag in zip(body.inputs, flags, strict=True) if flag}
    equations: list[Equation] = []
    for e in body.equations:
        own = tuple(v in members for v in e.inputs)
        inputs = tuple(of[v] for v in e.inputs)
        if not any(own):
            equations.append(renamed(e, of))
            of.update(zip(e.outputs, e.outputs, strict=True))
            continue
        members.update(e.outputs)
        if generated(e) or e.has(Trait.RESHAPE):
            outputs = tuple(_of_members(v, count) for v in e.outputs)
            of.update(zip(e.outputs, outputs, strict=True))
            if e.has(Trait.RESHAPE):
                shape = outputs[0].type.shape
                equations.append(replace(e, inputs=inputs, outputs=outputs, params={**e.params, "shape": shape}))
                continue
            distinct = dict(zip(e.inputs, own, strict=True))
            one = Program(tuple(distinct), {}, (e,), e.outputs)
            params = {"body": one, "count": count, "mapped": tuple(distinct.values())}
            given = tuple(of[v] for v in distinct)
            equations.append(replace(e, primitive=mapped_p, inputs=given, outputs=outputs, params=params))
        else:
            batched = _batched(e, inputs, own)
            equations += batched.equations
            constants |= batched.constants
            of.update(zip(e.outputs, batched.outputs, strict=True))
    results = []
    for v in body.outputs:
        if v not in members:  # the same for all members
            shape = (count, *v.type.shape)
            equations.append(Equation(PRIMITIVES["broadcast_to"], (of[v],), {"shape": shape}, (_of_members(v, count),)))
            results.append(equations[-1].outputs[0])
        else:
            results.append(of[v])
    return equations, results


def _of_members(v: Variable, count: int) -> Variable:
    return Variable(ArrayType((count, *v.type.shape), v.type.dtype), v.device)


def _batched(equation: Equation, inputs: Sequence[Variable], mapped: tuple[bool, ...]) -> Program:
    """The equations of the batching rule of an equation's primitive, on ``inputs``."""
    trace = StagingTrace()
    symbols = {v: trace.known(v) for v in dict.fromkeys(inputs)}
    try:
        with base_trace(trace), at(equation.scope, equation.phase):
            primitive = equation.primitive
            found = batching_rule(primitive)(
                partial(bind, primitive), mapped, *(symbols[v] for v in inputs), **equation.params
            )
    finally:
        trace.live = False
    return trace.program(found if isinstance(found, tuple) else (found,))


def share_first_launch(program: Program) -> Program:
    """One launch for the small elementwise equations and gathers that read inputs only, such as counters."""
    groups = Groups(program)
    first: int | None = None
    for i, e in enumerate(program.equations):
        simple = e.primitive is loops_p or elementwise(e) or e.primitive.name in BY_INDEX
        if not simple or not is_small(e) or any(v in groups.producer for v in e.inputs):
            continue
        if first is None:
            first = i
        elif groups.can_merge(groups.of[first], groups.of[i]):
            groups.merge(groups.of[first], groups.of[i])
    return groups.rewritten(partial(fuse, horizontal_p), anchor=min)
