"""Update fusion on the CPU: the optimizer's updates of many small parameters as one equation."""

from __future__ import annotations

from functools import partial

from adtrain.core.fused import HORIZONTAL, LOOPS, fuse
from adtrain.core.program import Equation, Program
from adtrain.passes.groups import Groups


def fuse_updates(program: Program) -> Program:
    """One `horizontal` equation for the independent elementwise equations of the update, whatever their shapes."""
    groups = Groups(program)
    first: int | None = None
    for i, e in enumerate(program.equations):
        if not _is_update(e):
            continue
        if first is None:
            first = i
        elif groups.can_merge(groups.of[first], i) and not _depend(groups, groups.of[first], i):
            groups.merge(groups.of[first], i)
    return groups.rewritten(partial(fuse, HORIZONTAL))


def _is_update(equation: Equation) -> bool:
    return equation.form == LOOPS and equation.phase == "update" and bool(equation.outputs[0].type.shape)


def _depend(groups: Groups, a: int, b: int) -> bool:
    return b in groups.producers(a) or a in groups.producers(b)
