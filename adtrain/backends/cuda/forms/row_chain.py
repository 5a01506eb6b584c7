"""Chains of rows: row-wise equations with products by small weights, and sums over the rows, as two launches.

Examples: the loss and all gradients of a multilayer perceptron on the rows of a table, or of a physics-informed network
with its derivatives. A thread block takes tiles of rows through all equations. The weights, and the values that later
equations need, stay in shared memory and in the L2 cache. See `codegen/row_chain_plan.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property

from adtrain.backends.cuda.codegen.part import Kernel
from adtrain.backends.cuda.codegen.row_chain import row_chain_kernels
from adtrain.backends.cuda.codegen.row_chain_layout import ROWS, layout_of
from adtrain.backends.cuda.codegen.row_chain_plan import MAX_WIDTH, is_by_row, is_plain, plan_chain, sums_rows, width
from adtrain.backends.cuda.codegen.thread_items import operations
from adtrain.backends.cuda.forms import LAUNCH_BYTES, Form, define
from adtrain.backends.cuda.forms.thread_items import MAX_OPERATIONS, items_of_threads
from adtrain.core.kernel import TENSOR_CORES, Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable, fuse
from adtrain.passes.fusion import Fusion, by_element
from adtrain.passes.groups import Groups

ROW_CHAIN = "row_chain"
"""Row-wise equations, products by small weights, and sums over rows. Thread blocks of a GPU take tiles of rows through
all of them."""

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
        return target.capability >= TENSOR_CORES and not target.by_member

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each equation; 0 for one without rows."""
        return [_count(e) for e in self.program.equations]

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        members = [*groups.members[groups.of[producer]], *groups.members[groups.of[reader]]]
        counts = {self.counts[i] for i in members} - {0}
        if len(counts) != 1 or not (self.counts[producer] or self._follows_sums(groups, producer)):
            return False
        (count,) = counts
        equations = [groups.equations[i] for i in members]
        made = {v for e in equations for v in e.outputs}
        return all(self._reads(e, self.counts[i], count, made) for e, i in zip(equations, members, strict=True))

    def _follows_sums(self, groups: Groups, i: int) -> bool:
        """Whether an equation is in a group with rows, so that it follows their sums."""
        return any(self.counts[k] for k in groups.members[groups.of[i]])

    @staticmethod
    def _reads(e: Equation, own: int, count: int, made: Collection[Variable]) -> bool:
        """Whether an equation of a chain of `count` rows can read what the others compute.

        Equations by row, and sums, read rows. Elementwise equations follow sums of their own shape.
        """
        read = [v.type.shape for v in e.inputs if v in made]
        if own:
            return all(shape[:1] == (count,) for shape in read)
        return by_element(e) and bool(read) and all(shape == v.type.shape for shape in read for v in e.outputs)

    def saves(self, equations: Sequence[Equation]) -> bool:
        """Whether the chain fits on chip, and takes less time than a kernel for each equation."""
        return self._refusal(equations) is None

    def _refusal(self, equations: Sequence[Equation]) -> str | None:
        """Why equations are no chain; None for a chain."""
        if (products := sum(e.has(Trait.MATMUL) for e in equations)) < MIN_PRODUCTS:
            return f"{products} of its products are connected by rows, expected at least {MIN_PRODUCTS}"
        if _are_thread_items(equations):
            return "it is so small that each thread computes all layers for a row"
        own = frozenset(equations)
        needed = [v for e in equations for v in e.outputs if self._leaves(v, own)]
        chain, count = fuse(ROW_CHAIN, equations, needed), max(map(_count, equations))
        plan = plan_chain(chain.params["body"], count)
        if plan is None:
            return "a result is neither rows nor a sum over them, or a value that it stores is not float32"
        layout = layout_of(plan, self.target)
        if layout is None:
            size = f"{self.target.shared / 1024:.0f} KiB of shared memory"
            return f"its weights and the values of {ROWS[0]} rows do not fit into the {size} of a thread block"
        time = 2 + layout.cycles / LAUNCH_CYCLES
        self.times.update(dict.fromkeys(equations, time))
        alone = sum(e.cost.bytes / LAUNCH_BYTES + 1 for e in equations if not e.primitive.view)
        moved = chain.cost.bytes / LAUNCH_BYTES
        if time + moved < alone:
            return None
        return f"one kernel would take as long as {time + moved:.0f} launches, separate kernels as long as {alone:.0f}"

    def declined(self) -> str | None:
        """A Program without axes but rows and columns is nearly a chain if at most one condition of a chain fails."""
        flat = all(sum(n != 1 for n in v.type.shape) <= 2 for e in self.program.equations for v in e.outputs)
        products = [e for e in self.program.equations if e.has(Trait.MATMUL) and not e.params["transpose_a"]]
        if not flat or not products:
            return None
        rows, count = Counter(e.outputs[0].type.shape[0] for e in products).most_common(1)[0]
        if count < MIN_PRODUCTS:
            return None
        own = [e for e in products if e.outputs[0].type.shape[0] == rows]
        widest = max(own, key=_columns)
        found = []
        if rows < MIN_ROWS:
            found.append(f"a step has {rows:,} rows, expected at least {MIN_ROWS:,}")
        if _columns(widest) > MAX_WIDTH:
            found.append(f"{widest.scope} has {_columns(widest):,} columns, expected at most {MAX_WIDTH}")
        if not all(map(is_plain, own)):
            found.append("not all of its products are of float32 in full precision")
        if self.target.capability < TENSOR_CORES:
            found.append("the GPU is older than sm_80")
        if found:
            return found[0] if len(found) == 1 else None
        return self._refusal(self.largest_group()) or "other kernels save more time"

    def overhead(self, equations: Sequence[Equation]) -> float:
        """Two launches and the time of the steps, in launches; the same where other forms take some equations."""
        return max((self.times.get(e, 0) for e in equations), default=0)

    @cached_property
    def times(self) -> dict[Equation, float]:
        """The time of the group of each equation."""
        return {}

    def _leaves(self, v: Variable, own: Collection[Equation]) -> bool:
        """Whether another equation, or the Program, needs a value."""
        return v in self.outputs or any(e not in own for e in self.program.readers.get(v, ()))


def _columns(product: Equation) -> int:
    """The columns of the wider one of the rows that a product reads and computes."""
    return max(width(product.inputs[0]), width(product.outputs[0]))


def _are_thread_items(equations: Sequence[Equation]) -> bool:
    """Whether threads can compute all equations item by item, as those of narrow networks without gradients."""
    found = [(e, items_of_threads(e)) for e in equations]
    return all(items and operations(e, items.count) <= MAX_OPERATIONS for e, items in found)


def _count(e: Equation) -> int:
    """The number of rows by which an equation works, or over which it sums; 0 if it does not."""
    for shape in (*(v.type.shape for v in e.outputs), *(v.type.shape for v in e.inputs)):
        if shape and shape[0] >= MIN_ROWS and (is_by_row(e, shape[0]) or sums_rows(e, shape[0])):
            return shape[0]
    return 0


def _kernels(equation: Equation, target: Target) -> list[Kernel]:
    return row_chain_kernels(equation, max(map(_count, equation.params["body"].equations)), target)


define(Form(ROW_CHAIN, _kernels, overwrites=lambda equation, argument, result: argument not in equation.inputs))
