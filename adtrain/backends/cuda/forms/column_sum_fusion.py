"""Column sums: the sum over the rows of a matrix, with the elementwise equations before and after it, as one kernel.

Examples: the gradient of a bias or of the weight of a norm, summed over the tokens of a batch, and the update by it.
Each thread block computes some columns from all rows, so such a kernel can share a launch with the weight gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from adtrain.core.fused import COLUMN_SUM, LOOPS
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable
from adtrain.core.types import Shape
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.fuse_products import reads_by_element
from adtrain.passes.fusion import Fusion
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


class ColumnSumFusion(Fusion):
    """A sum over rows, the loops that only it reads, and the loops that read it.

    A broadcast that only it reads is fused too, and the reshape between sequences and their rows. A sum that no loops
    read, such as a gradient for other ranks, becomes one too, so that it can share a launch.
    """

    form = COLUMN_SUM

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, e = groups.equations[producer], groups.equations[reader]
        if self.readers[value] > 1:
            return False
        if sums_columns(source):
            return len(groups.members[groups.of[reader]]) == 1 and _is_loops(e) and reads_by_element(e, value)
        sums = _sums_in(groups, reader)
        joins = len(sums) == 1 and not _sums_in(groups, producer) and (e in sums or e.has(Trait.RESHAPE))
        return joins and self._is_own(groups, source, sums[0])

    def _is_own(self, groups: Groups, source: Equation, total: Equation) -> bool:
        """Whether loops, a broadcast, or a reshape of their result, compute the argument of a sum for it alone."""
        if len(source.outputs) > 1:
            return False
        if not source.has(Trait.RESHAPE):
            return _is_loops(source) or source.has(Trait.BROADCAST)
        (x,) = source.inputs
        if row_axes(x.type.shape, total.outputs[0].size) is None or self.readers[x] > 1 or x not in groups.producer:
            return False
        return self._is_own(groups, groups.equations[groups.producer[x]], total)

    def alone(self, equation: Equation, readers: Sequence[Equation]) -> bool:
        return sums_columns(equation) and equation.inputs[0].size <= MAX_ALONE and not any(map(_is_loops, readers))


def _sums_in(groups: Groups, equation: int) -> list[Equation]:
    """The sums of columns in the group of an equation."""
    members = (groups.equations[i] for i in groups.members[groups.of[equation]])
    return [e for e in members if sums_columns(e)]


def column_blocks(equation: Equation) -> int:
    """The thread blocks of a `column_sum` equation."""
    total = next(e for e in equation.params["body"].equations if e.has(Trait.REDUCTION)).outputs[0]
    return -(-total.size // BLOCK_COLUMNS)


def row_axes(shape: Shape, columns: int) -> int | None:
    """The number of leading axes, if the axes after them have `columns` elements; None if there is no such number."""
    return next((axes for axes in range(len(shape), -1, -1) if prod(shape[axes:]) == columns), None)


def sums_columns(e: Equation) -> bool:
    """Whether an equation is a sum over the rows of a matrix: over the first axes of its argument."""
    if e.primitive.name != "sum" or not e.outputs[0].type.shape:
        return False
    (labels,), (kept,), columns = e.axes.arguments, e.axes.results, e.outputs[0].size
    rows = prod(e.inputs[0].type.shape[: -len(kept)])
    leading = labels[-len(kept) :] == kept
    fits = rows * columns > MIN_ELEMENTS and rows <= MAX_ROWS and columns <= MAX_COLUMNS
    return leading and fits and columns % VECTOR == 0 and e.inputs[0].type.dtype.name == "float32"


def _is_loops(e: Equation) -> bool:
    return e.form == LOOPS or (elementwise(e) and not e.has(Trait.BROADCAST))
