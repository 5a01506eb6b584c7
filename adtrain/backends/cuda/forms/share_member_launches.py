"""Fewer launches in a Program by member: independent equations share one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from adtrain.backends.cuda.codegen.index_rules import BY_INDEX
from adtrain.backends.cuda.forms.horizontal import MAX_POINTERS, blocks_in_launch, is_product
from adtrain.backends.cuda.forms.one_block import is_small
from adtrain.core.fused import HORIZONTAL, fuse, per_member_p, renamed
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups


class FirstLaunchFusion(Fusion):
    """The small elementwise equations and gathers that read inputs only, such as counters."""

    form = HORIZONTAL
    early = True

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        small = ((i, e) for i, e in enumerate(groups.equations) if is_small(e))
        simple = ((i, e) for i, e in small if by_element(e) or e.primitive.name in BY_INDEX)
        yield [i for i, e in simple if groups.producer.keys().isdisjoint(e.inputs)]


@keeps(Results.EXACT)
def share_counters(program: Program) -> Program:
    """Put counters into the first `per_member` equation that reads results of others; they become `shared` results.

    Counters are equations whose results are single numbers, which follow from inputs and which no other equation reads.
    """
    made = {v for e in program.equations for v in e.outputs}
    read = {v for e in program.equations for v in e.inputs}
    alone = [e for e in program.equations if e.primitive is not per_member_p and read.isdisjoint(e.outputs)]
    counters = [e for e in alone if made.isdisjoint(e.inputs) and all(map(_is_number, _members(e)))]
    equations = [e for e in program.equations if e not in counters]
    for i, e in enumerate(equations):
        if counters and e.primitive is per_member_p and not made.isdisjoint(e.inputs) and _can_share([e, *counters]):
            equations[i] = _with_counters(e, counters)
            return replace(program, equations=tuple(equations))
    return program


def _members(equation: Equation) -> Sequence[Equation]:
    """The equations in the launch of an equation; of a `per_member` equation, those of one member."""
    inner = equation.params["body"].equations[0] if equation.primitive is per_member_p else equation
    found: Sequence[Equation] = inner.params["body"].equations if inner.form == HORIZONTAL else (inner,)
    return found


def _can_share(equations: Sequence[Equation]) -> bool:
    """Whether one kernel can compute the equations, which are independent."""
    members = [m for e in equations for m in _members(e)]
    dtypes = {m.inputs[0].type.dtype for m in members if is_product(m)}
    pointers = sum(len(e.inputs) + len(e.outputs) for e in equations)
    return all(blocks_in_launch(m) is not None for m in members) and len(dtypes) <= 1 and pointers <= MAX_POINTERS


def _is_number(equation: Equation) -> bool:
    return by_element(equation) and equation.outputs[0].size == 1


def _with_counters(equation: Equation, counters: Sequence[Equation]) -> Equation:
    """A `per_member` equation that also computes counters, in the same launch."""
    body = equation.params["body"]
    outside = dict(zip((*body.inputs, *body.outputs), (*equation.inputs, *equation.outputs), strict=True))
    mapped = dict(zip(body.inputs, equation.params["mapped"], strict=True))
    inner = [*_members(equation)]
    for e in counters:
        # The body may use the same variables for values of one member.
        own = {v: Variable(v.type, v.device) for v in (*e.inputs, *e.outputs)}
        outside |= {w: v for v, w in own.items()}
        mapped |= {own[v]: False for v in e.inputs}
        inner += [renamed(m, own) for m in _members(e)]
    fused = fuse(HORIZONTAL, inner, list(outside))
    params = {
        "body": Program(fused.inputs, {}, (fused,), fused.outputs),
        "count": equation.params["count"],
        "mapped": tuple(mapped[v] for v in fused.inputs),
        "shared": sum(len(e.outputs) for e in counters),
    }
    inputs, outputs = (tuple(outside[v] for v in group) for group in (fused.inputs, fused.outputs))
    return replace(fused, primitive=per_member_p, inputs=inputs, outputs=outputs, params=params)
