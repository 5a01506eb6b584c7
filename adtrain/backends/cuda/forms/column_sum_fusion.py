"""Column sums: the sum over the rows of a matrix, with the elementwise equations before and after it, as one kernel.

Examples: the gradient of a bias or of the weight of a norm, summed over the tokens of a batch, and the update by it.
Each thread block computes some columns from all rows, so such a kernel can share a launch with the weight gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from math import prod

from adtrain.core.fused import COLUMN_SUM, LOOPS, fuse
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import Shape
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.fuse_products import reads_by_element
from adtrain.passes.groups import Groups

MIN_ELEMENTS = 1 << 16
"""A sum of no more elements is computed by one thread block (see `fuse_one_block`)."""
MAX_ROWS = 1 << 14
"""A sum of more rows is divided among more blocks, by the kernels of reductions."""
MAX_ALONE = 1 << 21
"""Maximum elements of a sum without other equations. A longer one is worth a launch of its own: in a launch with other
gradients it would wait until the arguments of all are ready."""
BLOCK_COLUMNS = 32
"""Columns of a thread block."""
VECTOR = 4
"""Columns of a thread. The columns of a sum must be a multiple of it."""
MAX_COLUMNS = 1 << 30
"""Maximum columns of a sum: the kernel counts them, and those of the last block, in 32 bits."""


def fuse_column_sums(program: Program) -> Program:
    """One `column_sum` equation for a sum over rows, the loops that only it reads, and the loops that read it.

    A broadcast that only it reads is fused too, and the reshape between sequences and their rows. A sum that no loops
    read, such as a gradient for other ranks, becomes one too, so that it can share a launch.
    """
    groups = Groups(program)
    readers = Counter((*program.outputs, *(v for e in program.equations for v in dict.fromkeys(e.inputs))))
    reader = {v: j for j, e in enumerate(program.equations) for v in e.inputs}

    def merge(a: int, b: int) -> None:
        if groups.can_merge(groups.of[a], groups.of[b]):
            groups.merge(groups.of[a], groups.of[b])

    def own_producers(v: Variable, columns: int) -> list[int]:
        """The loops or broadcast that compute `v`, and before them the reshape to `v`, if nothing else reads `v`."""
        p = groups.producer.get(v)
        if p is None or readers[v] > 1 or len(program.equations[p].outputs) > 1:
            return []
        e = program.equations[p]
        if e.has(Trait.RESHAPE) and row_axes(e.inputs[0].type.shape, columns) is not None:
            found = own_producers(e.inputs[0], columns)
            return [p, *found] if found else []
        return [p] if _is_loops(e) or e.has(Trait.BROADCAST) else []

    for i, e in enumerate(program.equations):
        if not sums_columns(e):
            continue
        (x,), (total,) = e.inputs, e.outputs
        for p in own_producers(x, total.size):
            merge(p, i)
        j = reader.get(total)
        if j is None or readers[total] > 1 or len(groups.members[groups.of[j]]) > 1:
            continue
        if _is_loops(program.equations[j]) and reads_by_element(program.equations[j], total):
            merge(i, j)
    fused = groups.rewritten(partial(fuse, COLUMN_SUM))
    alone = {
        e
        for e in fused.equations
        if sums_columns(e)
        and e.inputs[0].size <= MAX_ALONE
        and not any(map(_is_loops, fused.readers.get(e.outputs[0], ())))
    }
    equations = (fuse(COLUMN_SUM, [e], e.outputs) if e in alone else e for e in fused.equations)
    return replace(fused, equations=tuple(equations))


def column_blocks(equation: Equation) -> int:
    """The thread blocks of a `column_sum` equation."""
    total = next(e for e in equation.params["body"].equations if e.has(Trait.REDUCTION)).outputs[0]
    return -(-total.size // BLOCK_COLUMNS)


def row_axes(shape: Shape, columns: int) -> int | None:
    """The number of leading axes, if the axes after them have `columns` elements; None if there is no such number."""
    return next((axes for axes in range(len(shape), -1, -1) if prod(shape[axes:]) == columns), None)


def sums_columns(e: Equation) -> bool:
    if e.primitive.name != "sum" or not e.outputs[0].type.shape:
        return False
    shape, axes = e.inputs[0].type.shape, tuple(e.params["axes"])
    rows, columns = prod(shape[: len(axes)]), prod(shape[len(axes) :])
    leading = axes == tuple(range(len(axes)))
    fits = rows * columns > MIN_ELEMENTS and rows <= MAX_ROWS and columns <= MAX_COLUMNS
    return leading and fits and columns % VECTOR == 0 and e.inputs[0].type.dtype.name == "float32"


def _is_loops(e: Equation) -> bool:
    return e.form == LOOPS or (elementwise(e) and not e.has(Trait.BROADCAST))
