"""Horizontal joins: small equations that have a launch of their own join a horizontal launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adtrain.backends.cuda.forms.horizontal_fusion import MAX_POINTERS, blocks_in_launch
from adtrain.core.fused import HORIZONTAL, ONE_BLOCK, fuse
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import is_loops
from adtrain.passes.groups import Groups


def join_one_blocks(program: Program) -> Program:
    """Let each `one_block` equation, such as the sums of the metrics, join the first horizontal launch that it can.

    Its sums may have other bits then. Applied to each region, so the bits do not depend on the number of ranks.
    """
    return _joined(program, lambda e: e.form == ONE_BLOCK)


def join_loops(program: Program) -> Program:
    """Let loops of one block, such as the schedule, join the first horizontal launch that they can."""
    return _joined(program, lambda e: is_loops(e) and blocks_in_launch(e) == 1)


def _joined(program: Program, joins: Callable[[Equation], bool]) -> Program:
    groups = Groups(program)
    launches: list[int] = []
    for i, e in enumerate(program.equations):
        if e.form == HORIZONTAL:
            launches.append(i)
        elif joins(e):
            fitting = (x for x in launches if _pointers(groups, x, i) <= MAX_POINTERS)
            any(merge_independent(groups, x, i) for x in fitting)
    return groups.rewritten(_horizontal, anchor=min)


def merge_independent(groups: Groups, i: int, j: int) -> bool:
    """Merge the groups of two equations, if neither depends on the other."""
    if not independent(groups, i, j):
        return False
    groups.merge(groups.of[i], groups.of[j])
    return True


def independent(groups: Groups, i: int, j: int) -> bool:
    """Whether the groups of two equations do not depend on each other, and can be merged."""
    a, b = groups.of[i], groups.of[j]
    return not (a in groups.producers(b) or b in groups.producers(a)) and groups.can_merge(a, b)


def _pointers(groups: Groups, i: int, j: int) -> int:
    """The pointers of a launch of two groups."""
    members = [groups.equations[k] for x in (i, j) for k in groups.members[groups.of[x]]]
    return len({v for e in members for v in (*e.inputs, *e.outputs)})


def _horizontal(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    bodies = [e.params["body"].equations if e.form == HORIZONTAL else (e,) for e in equations]
    return fuse(HORIZONTAL, [member for body in bodies for member in body], needed)
