"""Batch-wise fusion on the CPU: a thread computes several equations for one item of the batch, with values in cache.

Examples: a convolution, its bias, activation and pooling; softmax, cross-entropy and its gradient; the masks of the
backward pass with the sums over the batch that give bias gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from adtrain.core.fused import BATCHWISE
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.batchwise import Batchwise, batchwise, is_divisible
from adtrain.passes.fuse_products import ProductFusion
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups

MIN_ITEMS = 8
"""With fewer items there is too little work for several threads."""
MIN_COARSE_ITEMS = 64
"""Minimum items if equations on more items are computed with them."""
MAX_EQUATIONS = 1024
"""Maximum equations of a group. Each is a call in the group's function, which compilers do not inline."""


class LargeProductFusion(ProductFusion):
    """A matrix product with an epilogue, unless `BatchwiseFusion` may take the product."""

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        return super().takes(product, epilogue) and batchwise(product) is None


class BatchwiseFusion(Fusion):
    """Each connected group of equations on the same number of items."""

    form = BATCHWISE
    in_order = True
    limit = MAX_EQUATIONS

    def __init__(self, program: Program, target: Target | None = None) -> None:
        super().__init__(program, target)
        self.found = [batchwise(e) for e in program.equations]
        self.divisible = [is_divisible(e) for e in program.equations]

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, consumer, e = self.found[producer], self.found[reader], groups.equations[reader]
        if source is None or consumer is None or consumer.count < MIN_ITEMS:
            return False
        if source.sums or not _same_phase(groups.equations[producer], e):
            return False
        a, b = groups.of[producer], groups.of[reader]
        return self._have_common_items(groups, a, b) and _by_item_only(groups, self.found, a, b)

    def _have_common_items(self, groups: Groups, a: int, b: int) -> bool:
        """Whether the items of one group are those of the other, or some neighbours of these."""
        (few, _), (many, fine) = sorted((self._count(groups.members[group]), group) for group in (a, b))
        if few == many:
            return True
        divisible = many % few == 0 and all(self.divisible[i] for i in groups.members[fine])
        return few >= MIN_COARSE_ITEMS and divisible

    def _count(self, members: Sequence[int]) -> int:
        """The number of items of a group."""
        return min(rule.count for i in members if (rule := self.found[i]) is not None)


def _same_phase(a: Equation, b: Equation) -> bool:
    """Whether both belong to one phase. The loss and its gradient count as one, and so does what is in no layer."""
    return a.phase == b.phase or a.scope == b.scope in ("", "loss")


def _by_item_only(groups: Groups, found: list[Batchwise | None], a: int, b: int) -> bool:
    """Whether group `b` reads group `a` item by item. Within each of the two this is so already."""
    for i in groups.members[b]:
        consumer = found[i]
        assert consumer is not None
        for v, flag in zip(groups.equations[i].inputs, consumer.flags, strict=True):
            p = groups.producer.get(v)
            if p is not None and groups.of[p] == a:
                producer = found[p]
                assert producer is not None
                if not flag or producer.sums:
                    return False
    return True
