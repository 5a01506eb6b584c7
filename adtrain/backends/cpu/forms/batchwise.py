"""Batch-wise fusion on the CPU: a thread computes several equations for one item of the batch, with values in cache.

Examples: a convolution, its bias, activation and pooling; softmax, cross-entropy and its gradient; the masks of the
backward pass with the sums over the batch that give bias gradients.
"""

from __future__ import annotations

from functools import partial

from adtrain.core.fused import BATCHWISE, fuse
from adtrain.core.program import Equation, Program
from adtrain.passes.batchwise import Batchwise, batchwise
from adtrain.passes.groups import MAX_EQUATIONS, Groups

MIN_ITEMS = 8
"""With fewer items there is too little work for several threads."""


def fuse_batchwise(program: Program) -> Program:
    """One `batchwise` equation for each connected group of equations on the same number of items."""
    groups = Groups(program, MAX_EQUATIONS)
    found = [batchwise(e) for e in program.equations]
    for i, e in enumerate(program.equations):
        consumer = found[i]
        if consumer is None or consumer.count < MIN_ITEMS:
            continue
        for v, flag in zip(e.inputs, consumer.flags, strict=True):
            p = groups.producer.get(v)
            producer = None if p is None else found[p]
            if p is None or producer is None or not flag or producer.sums or producer.count != consumer.count:
                continue
            a, b = groups.of[p], groups.of[i]
            if _same_phase(program.equations[p], e) and groups.can_merge(a, b) and _by_item_only(groups, found, a, b):
                groups.merge(a, b)
    return groups.rewritten(partial(fuse, BATCHWISE))


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
