"""Gather fusion: the loop that uses rows of a table reads them from the table, by index.

The indices may themselves be a row of a table, such as the batch's row of the epoch's order. The loop may store its
result transposed, such as images divided into patches.

A loop that reads a transpose reads the array before it, if neighbours in the one are at most NEAR elements apart in the
other. An example are filters whose channels are moved to the last axis.
"""

from __future__ import annotations

from math import prod

from adtrain.backends.cuda.forms.one_block import is_small
from adtrain.core.primitive import Trait
from adtrain.core.program import GATHER, Equation, Variable
from adtrain.passes.fusion import Fusion, by_element, reads_by_element
from adtrain.passes.groups import Groups

NEAR = 32
"""Maximum elements between two elements that a cache loads together."""
MAX_COPIED_ROW = 1 << 14
"""Elements of a row. Each reader of a shorter row gathers it by itself."""


class GatherFusion(Fusion):
    """Loops, the gathers and transposes that only they read, the gather of the row of indices, and the transpose that
    reads the loops.

    Each reader of a short row of indices gathers it by itself.
    """

    form = GATHER

    def copied(self, producer: Equation, reader: Equation) -> bool:
        return _is_short_row(producer) and not _is_short_row(reader)

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, e = groups.equations[producer], groups.equations[reader]
        if self.readers[value] > 1:
            return False
        if by_element(e):
            # `one_block` has both if both are small.
            reads = _gathers_rows(source) or _keeps_near(source)
            return reads and reads_by_element(e, value) and not (is_small(e) and is_small(source))
        if _gathers_rows(e) and len(groups.members[groups.of[reader]]) > 1:
            return value is e.inputs[1] and _gathers_one_row(source)
        return self._is_transposed(e) and self._gathers(groups, producer)

    def _is_transposed(self, e: Equation) -> bool:
        """Whether an equation is a transpose, or a reshape that only a transpose reads."""
        if e.primitive.name == "transpose":
            return True
        readers = self.program.readers.get(e.outputs[0], ())
        return (
            e.has(Trait.RESHAPE) and self.readers[e.outputs[0]] == len(readers) == 1 and self._is_transposed(readers[0])
        )

    def _gathers(self, groups: Groups, i: int) -> bool:
        """Whether the group of an equation with one result has loops and a gather of rows."""
        members = groups.group_of(i)
        return len(members) > 1 and len(groups.equations[i].outputs) == 1 and any(map(_gathers_rows, members))


def _keeps_near(e: Equation) -> bool:
    """Whether it is a transpose, and neighbours in its result or argument are at most NEAR apart in the other one."""
    if e.primitive.name != "transpose":
        return False
    shape, lengths, axes = e.inputs[0].type.shape, e.outputs[0].type.shape, e.params["axes"]
    inner = max((i for i, n in enumerate(lengths) if n > 1), default=0)
    inner_before = max((i for i, n in enumerate(shape) if n > 1), default=0)
    step, step_before = prod(shape[axes[inner] + 1 :]), prod(lengths[axes.index(inner_before) + 1 :])
    return 1 < min(step, step_before) <= NEAR


def _is_short_row(equation: Equation) -> bool:
    return _gathers_one_row(equation) and equation.outputs[0].size <= MAX_COPIED_ROW


def _gathers_rows(equation: Equation) -> bool:
    """Whether it is a gather along axis 0 of a table that is not empty."""
    if not equation.has(Trait.GATHER) or equation.params["axis"] != 0:
        return False
    return all(v.size for v in (*equation.inputs, *equation.outputs))


def _gathers_one_row(equation: Equation) -> bool:
    return _gathers_rows(equation) and equation.inputs[1].size == 1
