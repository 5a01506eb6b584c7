"""The passes that fuse equations for the CPU.

In batchwise fusion a thread computes several equations for one item of the batch, with values in cache. Examples: a
convolution, its bias, activation and pooling; softmax, cross-entropy and its gradient; the masks of the backward pass
with the sums over the batch that give bias gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from adtrain.core.axes import Items
from adtrain.core.kernel import CKernel, Target, c_kernels, value_for
from adtrain.core.primitive import Trait
from adtrain.core.program import HORIZONTAL, LOOPS, PRODUCT, Equation, Program, Variable, arguments_of, body_of
from adtrain.core.staging import Pass
from adtrain.passes import SIMPLIFY
from adtrain.passes.fuse_map_reduce import fuse_map_reduce
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.fusion import (
    ElementwiseFusion,
    Fusion,
    FusionPass,
    ProductFusion,
    by_element,
    fuse_product,
    fusions_of_users,
    reads_by_element,
)
from adtrain.passes.groups import Groups
from adtrain.passes.order import readers_first
from adtrain.passes.products import flatten_rows, fold_transposes, merge_added_products
from adtrain.passes.recompute import keep_derivatives, recompute
from adtrain.passes.simplify import remove_dead_code
from adtrain.passes.stack_members import stack_all_members

BATCHWISE = "batchwise"
"""Equations that work on one item of the batch at a time (an item is an index of axis 0). A CPU thread computes all of
them for an item. Outputs may be sums over the items."""

MIN_ITEMS = 8
"""Minimum items. With fewer there is too little work for several threads."""
MIN_COARSE_ITEMS = 64
"""Minimum items if equations on more items are computed with them."""
MAX_EQUATIONS = 1024
"""Maximum equations of a group. Each is a call in the group's function, which compilers do not inline."""


class LargeProductFusion(ProductFusion):
    """A matrix product with an epilogue, unless `BatchwiseFusion` may take the product."""

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        return super().takes(product, epilogue) and by_item(product) is None


class BatchwiseFusion(Fusion):
    """Each connected group of equations on the same number of items, or on several times as many smaller ones.

    The forward and backward phases of a loss with derivatives are one group if all its products are by row. So what one
    phase computes for the next stays in the cache.
    """

    form = BATCHWISE
    in_order = True
    limit = MAX_EQUATIONS

    def __init__(self, program: Program, target: Target | None = None) -> None:
        super().__init__(program, target)
        self.found = [by_item(e) for e in program.equations]
        self.sums = [sums_items(e) for e in program.equations]
        self.divisible = [is_divisible(e) for e in program.equations]

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, consumer, e = self.found[producer], self.found[reader], groups.equations[reader]
        if source is None or consumer is None or consumer.count < MIN_ITEMS:
            return False
        if self.sums[producer] or not _may_join_phases(groups.equations[producer], e):
            return False
        a, b = groups.of[producer], groups.of[reader]
        return self._have_common_items(groups, a, b) and self._by_item_only(groups, a, b)

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        """The equation of a group, whose loops of different phases are merged."""
        single = [x for e in equations for x in (body_of(e).equations if e.form == LOOPS else (e,))]
        merged = _merge_loops(Program(arguments_of(single), {}, tuple(single), tuple(needed)))
        return super().fused(merged.equations, needed)

    def _have_common_items(self, groups: Groups, a: int, b: int) -> bool:
        """Whether both groups have the same items, or an item of one is several neighbouring items of the other."""
        (few, _), (many, fine) = sorted((self._count(groups.members[group]), group) for group in (a, b))
        if few == many:
            return True
        divisible = many % few == 0 and all(self.divisible[i] for i in groups.members[fine])
        return few >= MIN_COARSE_ITEMS and divisible

    def _count(self, members: Sequence[int]) -> int:
        """The number of items of a group."""
        return min(found.count for i in members if (found := self.found[i]) is not None)

    def _by_item_only(self, groups: Groups, a: int, b: int) -> bool:
        """Whether group `b` reads group `a` item by item. Within each of the two this is so already."""
        for i in groups.members[b]:
            found = self.found[i]
            assert found is not None
            for v, flag in zip(groups.equations[i].inputs, found.flags, strict=True):
                p = groups.producer.get(v)
                if p is not None and groups.of[p] == a and (not flag or self.sums[p]):
                    return False
        return True


class _LoopsFusion(ElementwiseFusion):
    """Loops of one shape, in any phases."""

    across_phases = True


_merge_loops = FusionPass((_LoopsFusion,))


def _may_join_phases(a: Equation, b: Equation) -> bool:
    """Whether a group may have both phases: the update, which has a fusion of its own, joins no other phase."""
    return (a.phase == "update") == (b.phase == "update")


def by_item(equation: Equation) -> Items | None:
    """How a thread computes `equation` item by item, or adds items for it; None if it does neither."""
    if by_element(equation) or equation.has(Trait.RESHAPE):
        return equation.outer_items
    kernel = item_kernel(equation)
    return None if kernel is None else _items(kernel, equation)


def item_rule(equation: Equation) -> Items:
    """How an equation works item by item."""
    found = by_item(equation)
    assert found is not None
    return found


def item_count(equations: Sequence[Equation]) -> int:
    """The number of items of the equations of one group. It divides the number of each."""
    return min(item_rule(e).count for e in equations)


def is_divisible(equation: Equation) -> bool:
    """Whether several neighbouring items can be one item."""
    if by_element(equation) or equation.has(Trait.RESHAPE):
        return True
    kernel = item_kernel(equation)
    return kernel is not None and kernel.several_items


def sums_items(equation: Equation) -> bool:
    """Whether the outputs are sums over the items."""
    kernel = item_kernel(equation)
    return kernel is not None and kernel.sums


def item_kernel(equation: Equation) -> CKernel | None:
    """The C function that computes one item of `equation`."""
    return next((k for k in kernels(equation) if not k.team and _on_items(k, equation)), None)


def kernels(equation: Equation) -> tuple[CKernel, ...]:
    """The C functions that compute `equation`. A function on items does so where the equation has items."""
    found = [k for k in c_kernels(equation.name) if _holds(k.suits, equation)]
    return tuple(k for k in found if not _on_items(k, equation) or _items(k, equation) is not None)


def _holds(condition: Any, equation: Equation) -> bool:
    return bool(value_for(condition, *(v.type for v in equation.inputs), **equation.kernel_params))


def _on_items(kernel: CKernel, equation: Equation) -> bool:
    return _holds(kernel.items, equation)


def _items(kernel: CKernel, equation: Equation) -> Items | None:
    return equation.summed_items if kernel.sums else equation.items


HAVE_LOOPS = (BatchwiseFusion.form, PRODUCT)
"""Forms whose bodies have loops."""


class EpilogueLoopsFusion(ElementwiseFusion):
    """A loop nest for each connected group of elementwise equations of a shape and phase, and for a product's readers.

    All elementwise equations of a phase that read a product are one group. So they can be the epilogue of the product,
    which is not stored.
    """

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        for product in groups.equations:
            if product.has(Trait.MATMUL):
                (c,) = product.outputs
                by_phase: dict[str, list[int]] = {}
                for e in self.program.readers.get(c, ()):
                    if by_element(e) and reads_by_element(e, c):
                        by_phase.setdefault(e.phase, []).append(groups.producer[e.outputs[0]])
                yield from by_phase.values()


class UpdateFusion(Fusion):
    """The independent elementwise equations of the update, whatever their shapes."""

    form = HORIZONTAL

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        yield [i for i, e in enumerate(groups.equations) if _is_update(e)]


def _is_update(equation: Equation) -> bool:
    return equation.form == LOOPS and equation.phase == "update" and bool(equation.outputs[0].type.shape)


def cpu_fusions(by_member: bool = False) -> Sequence[Pass]:
    """The passes that fuse several equations into one function, for the CPU.

    Batching rules compute a Program by member. A product over the rows of all members would depend on their number.
    """
    of_members = stack_all_members, *SIMPLIFY, fold_transposes
    first = of_members if by_member else (fold_transposes, merge_added_products, flatten_rows)
    return (
        *first,
        fuse_map_reduce,
        remove_dead_code,
        partial(fuse_maxpool_gradients, has_kernel=lambda e: item_kernel(e) is not None, all_readers=False),
        remove_dead_code,
        keep_derivatives,
        FusionPass((EpilogueLoopsFusion,)),
        *(FusionPass((fusion,)) for fusion in fusions_of_users("cpu")),
        FusionPass((LargeProductFusion,)),
        FusionPass((BatchwiseFusion,)),
        fuse_product,
        partial(recompute, sources=HAVE_LOOPS, readers=HAVE_LOOPS),
        FusionPass((UpdateFusion,)),
        readers_first,
    )
