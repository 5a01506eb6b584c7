"""Chains of rows: row-wise equations with products by small weights, and sums over the rows, as two launches.

Examples: the loss and all gradients of a multilayer perceptron on the rows of a table, or of a physics-informed network
with its derivatives. A thread block takes tiles of rows through all equations. It keeps the weights and the values that
later equations need in shared memory, so no activation goes to device memory. See `codegen/row_chain_plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from adtrain.backends.cuda.codegen.part import Kernel
from adtrain.backends.cuda.codegen.row_chain import Layout, layout_of, row_chain_kernels
from adtrain.backends.cuda.codegen.row_chain_plan import is_by_row, plan_chain, sums_rows
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.core.fused import fuse
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups

if TYPE_CHECKING:
    from adtrain.backends.cuda.lower import Lowering

ROW_CHAIN = "row_chain"
"""Row-wise equations, products by small weights, and sums over rows. Thread blocks of a GPU take tiles of rows through
all of them."""

MIN_CAPABILITY = (8, 0)
"""Compute capability with tf32 on tensor cores."""
MIN_ROWS = 1 << 11
"""Fewer rows leave multiprocessors without work."""
LAUNCH_CYCLES = 3500
"""Cycles in the time of a launch, 2 us."""
MIN_PRODUCTS = 3
"""Fewer products are not worth the loads of weights."""


class RowChainFusion(Fusion):
    """Each connected group of row-wise equations, the sums over their rows, and elementwise equations of the sums."""

    form = ROW_CHAIN
    limit = 4096
    in_order = True

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return target.capability >= MIN_CAPABILITY and not target.by_member

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each equation; 0 for one without rows."""
        return [_count(e) for e in self.program.equations]

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        count = self.counts[producer] or self._rows_of_group(groups, producer)
        if count < MIN_ROWS:
            return False
        e = groups.equations[reader]
        if self.counts[reader]:
            by_row = self.counts[reader] == count and value.type.shape[:1] == (count,)
            return by_row and self._passes_rows(groups, producer, reader)
        return self._follows(groups, e, value, count)

    def _rows_of_group(self, groups: Groups, i: int) -> int:
        return max(self.counts[k] for k in groups.members[groups.of[i]])

    def _passes_rows(self, groups: Groups, producer: int, reader: int) -> bool:
        """Whether no value of the two groups is a sum that an equation by row reads."""
        members = [*groups.members[groups.of[producer]], *groups.members[groups.of[reader]]]
        equations = [groups.equations[i] for i in members]
        totals = {v for e, i in zip(equations, members, strict=True) for v in e.outputs if not _is_row_value(v, self.counts[i])}
        by_row = (e for e, i in zip(equations, members, strict=True) if self.counts[i])
        return not any(v in totals for e in by_row for v in e.inputs)

    def _follows(self, groups: Groups, e: Equation, value: Variable, count: int) -> bool:
        """Whether an equation reads sums over rows, element by element, and can follow them."""
        if not by_element(e) or value.type.shape[:1] == (count,) or len(e.outputs) == 0:
            return False
        return all(v.type.shape == value.type.shape for v in e.outputs)

    def saves(self, equations: Sequence[Equation]) -> bool:
        products = sum(e.has(Trait.MATMUL) for e in equations)
        return products >= MIN_PRODUCTS and self._layout(equations) is not None

    def overhead(self, equations: Sequence[Equation]) -> float:
        """Two launches and the time of the steps. The other forms compute while they move more bytes."""
        layout = self._layout(equations) if equations else None
        return math.inf if layout is None else 2 + layout.cycles / LAUNCH_CYCLES

    def _layout(self, equations: Sequence[Equation]) -> Layout | None:
        """How a kernel for these equations divides the work; None if it does not fit on chip."""
        key = frozenset(equations)
        if key not in self._layouts:
            in_order = [e for e in self.program.equations if e in key]
            needed = [v for e in in_order for v in e.outputs if self._leaves(v, key)]
            plan = plan_chain(fuse(ROW_CHAIN, in_order, needed).params["body"], max(map(_count, in_order)))
            self._layouts[key] = None if plan is None else layout_of(plan, self.target)
        return self._layouts[key]

    @cached_property
    def _layouts(self) -> dict[frozenset[Equation], Layout | None]:
        return {}

    def _leaves(self, v: Variable, own: Collection[Equation]) -> bool:
        """Whether another equation, or the Program, needs a value."""
        return v in self.program.outputs or any(e not in own for e in self.program.readers.get(v, ()))


def _count(e: Equation) -> int:
    """The number of rows by which an equation works, or over which it sums; 0 if it does not."""
    for shape in (*(v.type.shape for v in e.outputs), *(v.type.shape for v in e.inputs)):
        if shape and shape[0] >= MIN_ROWS and (is_by_row(e, shape[0]) or sums_rows(e, shape[0])):
            return shape[0]
    return 0


def _is_row_value(v: Variable, count: int) -> bool:
    return bool(count) and v.type.shape[:1] == (count,)


def _rows(body: Program) -> int:
    return max(map(_count, body.equations))


def _kernels(equation: Equation, lowering: Lowering) -> list[Kernel]:
    return row_chain_kernels(equation, _rows(equation.params["body"]), lowering.target)


define(Form(ROW_CHAIN, _kernels, overwrites=lambda equation, argument, result: argument not in equation.inputs))
