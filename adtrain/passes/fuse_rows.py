"""Row fusion: the narrow end of a network (logits, softmax, cross-entropy and their gradients) as one kernel.

Row n of each of these equations needs row n of the others, and a weight small enough for every thread block to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

from adtrain.core.fused import fuse, loops_p, row_fused_p
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.batchwise import Batchwise, rowwise
from adtrain.passes.fuse_one_block import is_small
from adtrain.passes.groups import MAX_EQUATIONS, Groups

MIN_ROWS = 32
"""Fewer rows are computed by one thread block."""
MAX_WIDTH = 1024
"""Maximum elements of a row."""
MAX_NARROW = 32
"""Maximum of the smaller length of a product's right operand. GEMM kernels are faster for wider ones."""
MAX_WEIGHT = 8 << 10
"""Maximum elements of a product's right operand. Every thread block reads it while it waits for its first row."""


def fuse_rows(program: Program) -> Program:
    """One `row_fused` equation for each connected group of row-wise equations too large for one thread block."""
    found = _row_wise(program)
    groups = merged_rows(program, found, range(len(found)))
    worth = [m for m in groups.members.values() if _saves_launches([program.equations[i] for i in m])]
    chosen = {i for members in worth for i in members}
    return merged_rows(program, found, chosen).rewritten(partial(fuse, row_fused_p))


def _saves_launches(equations: Sequence[Equation]) -> bool:
    """Whether the group saves launches that a single thread block for all of it would not save."""
    launches = [e for e in equations if not e.has(Trait.RESHAPE)]
    return len(launches) > 1 and not all(map(is_small, launches))


def shared_inputs(body: Program) -> set[Variable]:
    """The inputs of a `row_fused` body that every thread block reads completely."""
    return {v for e in body.equations for v, by_row in zip(e.inputs, _required(e).flags, strict=True) if not by_row}


def _row_wise(program: Program) -> list[Batchwise | None]:
    """How each equation works row by row. Loops with one result that read a large product do not: they become its
    epilogue. An epilogue with several results would write more than the product."""
    wide = {v for e in program.equations if e.has(Trait.MATMUL) and _by_row(e) is None for v in e.outputs}

    def is_epilogue(e: Equation) -> bool:
        return e.primitive is loops_p and len(e.outputs) == 1 and not wide.isdisjoint(e.inputs)

    return [None if is_epilogue(e) else _by_row(e) for e in program.equations]


def _required(equation: Equation) -> Batchwise:
    found = _by_row(equation)
    assert found is not None
    return found


def _by_row(equation: Equation) -> Batchwise | None:
    e = equation
    found = _narrow_product(e) if e.has(Trait.MATMUL) else rowwise(e)
    if found is None or found.count < MIN_ROWS:
        return None
    by_row = [v for v, flag in zip(e.inputs, found.flags, strict=True) if flag]
    return found if all(0 < v.size <= MAX_WIDTH * found.count for v in (*by_row, *e.outputs)) else None


def _narrow_product(equation: Equation) -> Batchwise | None:
    a, b = equation.inputs
    params = equation.params
    if len(a.type.shape) != 2 or params["transpose_a"] or params["precision"] != FULL or a is b:
        return None
    if b.size > MAX_WEIGHT or min(b.type.shape) > MAX_NARROW:
        return None
    return Batchwise(a.type.shape[0], (True, False), False)


def merged_rows(
    program: Program, found: list[Batchwise | None], allowed: Collection[int], single: Collection[int] = ()
) -> Groups:
    """Groups of the `allowed` equations that pass rows to one another; a group has at most one of the `single` ones."""
    groups = Groups(program, MAX_EQUATIONS)
    readers = Counter((*program.outputs, *(v for e in program.equations for v in dict.fromkeys(e.inputs))))
    for i, e in enumerate(program.equations):
        consumer = found[i]
        if consumer is None or i not in allowed or e.has(Trait.RESHAPE):
            continue
        sources = [v for v, flag in zip(e.inputs, consumer.flags, strict=True) if flag]
        while sources:
            v = sources.pop()
            p = groups.producer.get(v)
            producer = found[p] if p is not None and p in allowed else None
            if p is None or producer is None or producer.count != consumer.count:
                continue
            view = program.equations[p].has(Trait.RESHAPE)
            if view and readers[v] > 1:
                continue  # a reshape inside the kernel is not stored, so other kernels could not read it
            a, b = groups.of[p], groups.of[i]
            singles = sum(i in single for i in groups.members[a] + groups.members[b]) if single else 0
            if a != b and singles <= 1 and groups.can_merge(a, b) and _by_row_only(groups, found, a, b):
                groups.merge(a, b)
                if view:
                    sources.append(program.equations[p].inputs[0])
    return groups


def _by_row_only(groups: Groups, found: list[Batchwise | None], a: int, b: int) -> bool:
    """Whether no value of two groups is computed or read by row in one equation and read whole in another."""
    read_whole: set[Variable] = set()
    rows: set[Variable] = set()
    for i in groups.members[a] + groups.members[b]:
        consumer = found[i]
        assert consumer is not None
        rows.update(groups.equations[i].outputs)
        for v, by_row in zip(groups.equations[i].inputs, consumer.flags, strict=True):
            (rows if by_row else read_whole).add(v)
    return rows.isdisjoint(read_whole)
