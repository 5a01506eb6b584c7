"""Gather fusion: the loop that uses rows of a table reads them from the table, by index.

The indices may themselves be a row of a table, such as the batch's row of the epoch's order. The loop may store its
result transposed, such as images divided into patches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from adtrain.backends.cuda.forms.one_block_fusion import is_small
from adtrain.core.fused import GATHER, fuse, renamed
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fuse_products import reads_by_element
from adtrain.passes.groups import Groups

MAX_COPIED_ROW = 1 << 14
"""Elements of a row. Each reader of a shorter row gathers it by itself."""


def fuse_gathers(program: Program) -> Program:
    """One `gather` equation for loops, the gathers that only they read, the gather of the row of indices, and the
    transpose that reads the result."""
    program = _copy_rows(program)
    groups = Groups(program)
    readers = Counter((*program.outputs, *(v for e in program.equations for v in dict.fromkeys(e.inputs))))
    for i, e in enumerate(program.equations):
        if not by_element(e):
            continue
        for v in dict.fromkeys(e.inputs):
            p = groups.producer.get(v)
            if p is None or readers[v] > 1 or not _gathers_rows(program.equations[p]) or not reads_by_element(e, v):
                continue
            if is_small(e) and is_small(program.equations[p]):
                continue  # `fuse_one_block` fuses both
            if groups.can_merge(groups.of[p], groups.of[i]):
                groups.merge(groups.of[p], groups.of[i])
                indices = program.equations[p].inputs[1]
                q = groups.producer.get(indices)
                if q is None or readers[indices] > 1 or not _gathers_one_row(program.equations[q]):
                    continue
                if groups.can_merge(groups.of[q], groups.of[i]):
                    groups.merge(groups.of[q], groups.of[i])
    for i, e in enumerate(program.equations):
        if e.primitive.name == "transpose":
            _merge_transpose(groups, readers, i)
    return groups.rewritten(partial(fuse, GATHER))


def _merge_transpose(groups: Groups, readers: Mapping[Variable, int], i: int) -> None:
    """Merge a transpose, and a reshape before it, into the group of a gather whose result only they read."""
    path = [i]
    while True:
        (v, *_) = groups.equations[path[-1]].inputs
        p = groups.producer.get(v)
        if p is None or readers[v] > 1 or len(groups.equations[p].outputs) > 1:
            return
        path.append(p)
        if not groups.equations[p].has(Trait.RESHAPE):
            break
    members = [groups.equations[j] for j in groups.members[groups.of[p]]]
    if any(_gathers_rows(e) for e in members) and len(members) > 1:
        for j in path[-2::-1]:
            if not groups.can_merge(groups.of[p], groups.of[j]):
                return
            groups.merge(groups.of[p], groups.of[j])


def _copy_rows(program: Program) -> Program:
    """Give each reader of a short gathered row a gather of its own."""
    rows = {e.outputs[0]: e for e in program.equations if _gathers_one_row(e) and e.outputs[0].size <= MAX_COPIED_ROW}
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


def _gathers_rows(equation: Equation) -> bool:
    """Whether it is a gather along axis 0 of a table that is not empty."""
    if not equation.has(Trait.GATHER) or equation.params["axis"] != 0:
        return False
    return all(v.size for v in (*equation.inputs, *equation.outputs))


def _gathers_one_row(equation: Equation) -> bool:
    return _gathers_rows(equation) and equation.inputs[1].size == 1
