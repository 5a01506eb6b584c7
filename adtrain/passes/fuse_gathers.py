"""Gather fusion: rows by index are read where the table has them, by the loop that uses them.

The indices may themselves be a row of a table, at a position that is known by then: the batch's row in an order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from adtrain.core.fused import fuse, gather_p, loops_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_blocks import is_small, renamed
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.fuse_products import reads_whole
from adtrain.passes.groups import Groups

SHORT = 1 << 14
"""Elements of a row, at most, that each of several readers takes for itself."""


def fuse_gathers(program: Program) -> Program:
    """One `gather` equation for loops, the rows by index that nobody else reads, and the row that has the indices."""
    program = _own_rows(program)
    groups = Groups(program)
    readers = Counter((*program.outputs, *(v for e in program.equations for v in dict.fromkeys(e.inputs))))
    for i, e in enumerate(program.equations):
        if e.primitive is not loops_p and not elementwise(e):
            continue
        for v in dict.fromkeys(e.inputs):
            p = groups.producer.get(v)
            if p is None or readers[v] > 1 or not _takes_rows(program.equations[p]) or not reads_whole(e, v):
                continue
            if is_small(e) and is_small(program.equations[p]):
                continue  # a thread block computes both
            if groups.can_merge(groups.of[p], groups.of[i]):
                groups.merge(groups.of[p], groups.of[i])
                indices = program.equations[p].inputs[1]
                q = groups.producer.get(indices)
                if q is None or readers[indices] > 1 or not _takes_one_row(program.equations[q]):
                    continue
                if groups.can_merge(groups.of[q], groups.of[i]):
                    groups.merge(groups.of[q], groups.of[i])
    return groups.rewritten(partial(fuse, gather_p))


def _own_rows(program: Program) -> Program:
    """Each reader of a short row of a table gets it by an equation of its own."""
    rows = {e.outputs[0]: e for e in program.equations if _takes_one_row(e) and e.outputs[0].size <= SHORT}
    equations: list[Equation] = []
    needed = set(program.outputs)
    for e in program.equations:
        copies = {
            v: Variable(v.type, v.device) for v in dict.fromkeys(e.inputs) if v in rows and e.outputs[0] not in rows
        }
        equations += [replace(rows[v], outputs=(copy,), phase=e.phase) for v, copy in copies.items()]
        equations.append(renamed(e, copies) if copies else e)
        needed.update(equations[-1].inputs)
    return replace(program, equations=tuple(e for e in equations if e.outputs[0] not in rows or e.outputs[0] in needed))


def _takes_rows(equation: Equation) -> bool:
    """Whether it is a `take` along the first axis, of a table that has rows."""
    if equation.primitive.name != "take" or equation.params["axis"] != 0:
        return False
    return all(v.size for v in (*equation.inputs, *equation.outputs))


def _takes_one_row(equation: Equation) -> bool:
    return _takes_rows(equation) and equation.inputs[1].size == 1
