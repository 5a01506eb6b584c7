"""Batch-wise fusion on the CPU: a thread computes several equations for one item of the batch, with values in cache.

Examples: a convolution, its bias, activation and pooling; softmax, cross-entropy and its gradient; the masks of the
backward pass with the sums over the batch that give bias gradients.
"""

from __future__ import annotations

from adtrain.core.fused import BATCHWISE
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.batchwise import Batchwise, batchwise
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import MAX_EQUATIONS, Groups

MIN_ITEMS = 8
"""With fewer items there is too little work for several threads."""


class BatchwiseFusion(Fusion):
    """Each connected group of equations on the same number of items."""

    form = BATCHWISE
    in_order = True
    limit = MAX_EQUATIONS

    def __init__(self, program: Program, target: Target | None = None) -> None:
        super().__init__(program, target)
        self.found = [batchwise(e) for e in program.equations]

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, consumer, e = self.found[producer], self.found[reader], groups.equations[reader]
        if source is None or consumer is None or consumer.count < MIN_ITEMS:
            return False
        if source.sums or source.count != consumer.count or not _same_phase(groups.equations[producer], e):
            return False
        return _by_item_only(groups, self.found, groups.of[producer], groups.of[reader])


def _same_phase(a: Equation, b: Equation) -> bool:
    """Whether both belong to one phase. The loss and its gradient count as one."""
    return a.phase == b.phase or a.scope == b.scope == "loss"


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
