"""Update fusion: the optimizer's update of many parameters as one equation."""

from __future__ import annotations

from functools import partial

from adtrain.core.fused import fuse, loops_p, together_p
from adtrain.core.program import Equation, Program
from adtrain.passes.groups import Groups


def merge_updates(program: Program) -> Program:
    """One `together` equation for loops of the update that do not depend on one another, whatever their shapes."""
    groups = Groups(program)
    first: int | None = None
    for i, e in enumerate(program.equations):
        if not _is_update(e):
            continue
        if first is None:
            first = i
        elif groups.can_merge(groups.of[first], i) and not _depend(groups, groups.of[first], i):
            groups.merge(groups.of[first], i)
    return groups.rewritten(partial(fuse, together_p))


def _is_update(equation: Equation) -> bool:
    return equation.primitive is loops_p and equation.phase == "update" and bool(equation.outputs[0].type.shape)


def _depend(groups: Groups, a: int, b: int) -> bool:
    return b in groups.producers(a) or a in groups.producers(b)
