"""Long rows: equations along rows that registers do not hold, such as a loss over the words of a vocabulary.

A block takes a row through all equations, and reads it from device memory once if it fits into shared memory
(`codegen/long_rows.py`). So the loss of a classification, its gradient, and the most probable class cost one read of
the logits and one write of their gradient. Probabilities and one-hot labels are never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from adtrain.backends.cuda.codegen.long_rows import long_rows, may_overwrite
from adtrain.backends.cuda.codegen.part import Kernel, kernel
from adtrain.backends.cuda.codegen.register_rows import THREADS, Rows, register_rows, rows_of
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.row_fused import BY_INDEX, MAX_WIDTH, ROW_FUSED, RowFusion, held_rows, readers_of_rows
from adtrain.core.axes import Items
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable, body_of
from adtrain.passes.groups import Groups

LONG_ROWS = "long_rows"
"""Equations of rows of more than MAX_WIDTH elements. Each thread block of a GPU computes all of them for its row."""
MAX_LENGTH = 1 << 18
"""Maximum elements of a row. A thread adds up to 128 of them in order."""
NORMALIZING = frozenset(("softmax", "log_softmax", "standardize"))
"""Primitives that read their rows more than once where threads do not hold them."""


class LongRowsFusion(RowFusion):
    """Equations of long rows, where the rows are so many that each multiprocessor has one."""

    form = LONG_ROWS

    @cached_property
    def held(self) -> Mapping[Equation, Rows]:
        return held_rows(self.program, self._fit, BY_INDEX)

    def _fit(self, rows: Rows) -> bool:
        return _fit(rows, self.target)

    def row_wise(self) -> list[Items | None]:
        return [e.rows(self.held[e].count) if e in self.held else None for e in self.program.equations]

    def fits_rows(self, members: Sequence[int]) -> bool:
        return len({self.held[self.program.equations[i]] for i in members}) == 1

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        return readers_of_rows(groups, self.held)

    def saves(self, equations: Sequence[Equation]) -> bool:
        launches = [e for e in equations if not e.has(Trait.RESHAPE)]
        return len(launches) > 1 and any(map(rows_of, equations))


def _fit(rows: Rows, target: Target) -> bool:
    """Whether rows are too long for registers, and each multiprocessor has one."""
    return rows.count >= target.multiprocessors and MAX_WIDTH < rows.length <= MAX_LENGTH


def rows_alone(equation: Equation, target: Target) -> list[Kernel]:
    """The kernel of a softmax or norm that shares no kernel, if threads or a block hold its rows; none otherwise."""
    rows = rows_of(equation) if equation.primitive.name in NORMALIZING else None
    if rows is not None and rows.length <= MAX_WIDTH:
        part = register_rows(body_of(equation), shortest=1)
        return [] if part is None else [kernel(ROW_FUSED, [part], THREADS)]
    if rows is not None and _fit(rows, target):
        return _kernels(equation, target)
    return []


def _kernels(equation: Equation, target: Target) -> list[Kernel]:
    part, threads, resident = long_rows(body_of(equation), target)
    return [kernel(LONG_ROWS, [part], threads, resident=resident)]


def _overwrites(equation: Equation, argument: Variable, result: Variable) -> bool:
    return argument not in equation.inputs or may_overwrite(body_of(equation), argument, result)


define(Form(LONG_ROWS, _kernels, converts=True, overwrites=_overwrites))
