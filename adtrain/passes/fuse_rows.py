"""Row fusion: narrow layers at the end of a network, the loss and the way back, without a launch in between.

Logits, softmax, cross-entropy and its gradient, and the gradient of what the logits were made of: row n of each needs
row n of the others, and a weight that is small enough for each thread block to read all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

from adtrain.core.fused import fuse, loops_p, rows_p
from adtrain.core.precision import FULL
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_blocks import is_small
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.groups import Groups
from adtrain.passes.items import ByItem, by_item

FORMS = frozenset(("sum", "max", "min", "softmax", "log_softmax", "argmax", "take_along_axis", "scatter_along_axis"))
FEWEST = 32
"""Rows; fewer are for a thread block."""
WIDEST = 1024
"""Elements of a row."""
NARROW = 32
"""The rows or the columns of a product's right side; engines that share more are faster."""
WEIGHT = 8 << 10
"""Elements of a product's right side: each thread block reads it, in about as long as it waits for its first one."""


def fuse_rows(program: Program) -> Program:
    """One `rows` equation for each connected group of equations on the same rows that is more than a block can do."""
    local = _by_rows(program)
    groups = _merged(program, local, range(len(local)))
    worth = [m for m in groups.members.values() if _worth([program.equations[i] for i in m])]
    chosen = {i for members in worth for i in members}
    return _merged(program, local, chosen).rewritten(partial(fuse, rows_p))


def _worth(equations: Sequence[Equation]) -> bool:
    """Whether a group saves a launch that a thread block for all of it would not save."""
    launches = [e for e in equations if e.primitive.name != "reshape"]
    return len(launches) > 1 and not all(map(is_small, launches))


def shared_inputs(body: Program) -> set[Variable]:
    """The inputs of a `rows` equation's body that each thread block reads all of."""
    return {v for e in body.equations for v, by_row in zip(e.inputs, _required(e).flags, strict=True) if not by_row}


def _by_rows(program: Program) -> list[ByItem | None]:
    """How each equation works row by row; those that a larger product takes along do not."""
    wide = {v for e in program.equations if e.primitive.name == "matmul" and _rows(e) is None for v in e.outputs}
    found = []
    for e in program.equations:
        mine = _rows(e)
        found.append(None if mine is None or (wide.intersection(e.inputs) and e.primitive is loops_p) else mine)
    return found


def _required(equation: Equation) -> ByItem:
    found = _rows(equation)
    assert found is not None
    return found


def _rows(equation: Equation) -> ByItem | None:
    e = equation
    if e.primitive.name == "matmul":
        found = _narrow_product(e)
    elif e.primitive is loops_p or elementwise(e) or e.primitive.name == "reshape" or e.primitive.name in FORMS:
        found = by_item(e)
    else:
        return None
    if found is None or found.sums or found.count < FEWEST:
        return None
    by_row = [v for v, flag in zip(e.inputs, found.flags, strict=True) if flag]
    return found if all(0 < v.size <= WIDEST * found.count for v in (*by_row, *e.outputs)) else None


def _narrow_product(equation: Equation) -> ByItem | None:
    a, b = equation.inputs
    params = equation.params
    if len(a.type.shape) != 2 or params["transpose_a"] or params["precision"] != FULL or a is b:
        return None
    if b.size > WEIGHT or min(b.type.shape) > NARROW:
        return None
    return ByItem(a.type.shape[0], (True, False), False)


def _merged(program: Program, local: list[ByItem | None], allowed: Collection[int]) -> Groups:
    """Groups of those of the `allowed` equations that hand rows to one another."""
    groups = Groups(program)
    readers = Counter((*program.outputs, *(v for e in program.equations for v in dict.fromkeys(e.inputs))))
    for i, e in enumerate(program.equations):
        mine = local[i]
        if mine is None or i not in allowed or e.primitive.name == "reshape":
            continue
        handed = [v for v, flag in zip(e.inputs, mine.flags, strict=True) if flag]
        while handed:
            v = handed.pop()
            p = groups.producer.get(v)
            theirs = local[p] if p is not None and p in allowed else None
            if p is None or theirs is None or theirs.count != mine.count:
                continue
            view = program.equations[p].primitive.name == "reshape"
            if view and readers[v] > 1:
                continue  # nobody writes a view, so it cannot be handed on to others
            a, b = groups.of[p], groups.of[i]
            if a != b and groups.can_merge(a, b) and _by_rows_only(groups, local, a, b):
                groups.merge(a, b)
                if view:
                    handed.append(program.equations[p].inputs[0])
    return groups


def _by_rows_only(groups: Groups, local: list[ByItem | None], a: int, b: int) -> bool:
    """Whether no value is needed row by row in one place, or made in two groups, and needed whole in another."""
    whole: set[Variable] = set()
    rows: set[Variable] = set()
    for i in groups.members[a] + groups.members[b]:
        mine = local[i]
        assert mine is not None
        rows.update(groups.equations[i].outputs)
        for v, by_row in zip(groups.equations[i].inputs, mine.flags, strict=True):
            (rows if by_row else whole).add(v)
    return rows.isdisjoint(whole)
