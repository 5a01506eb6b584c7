"""Item fusion: equations that work item by item run for one item after another, their values staying in cache.

A convolution, its bias, activation and pooling, and the next convolution; softmax, cross-entropy and its gradient; the
masks of the backward pass, with the sums over the batch that give the gradients of biases and kernels.
"""

from __future__ import annotations

from functools import partial

from adtrain.core.fused import fuse, items_p
from adtrain.core.program import Equation, Program
from adtrain.passes.groups import Groups
from adtrain.passes.items import ByItem, by_item

FEWEST_ITEMS = 8
"""With fewer there is too little to divide among threads, and each equation does better on its own."""


def fuse_items(program: Program) -> Program:
    """One `items` equation for each connected group of equations that work on the same number of items."""
    groups = Groups(program)
    local = [by_item(e) for e in program.equations]
    for i, e in enumerate(program.equations):
        mine = local[i]
        if mine is None or mine.count < FEWEST_ITEMS:
            continue
        for v, flag in zip(e.inputs, mine.flags, strict=True):
            p = groups.producer.get(v)
            theirs = None if p is None else local[p]
            if p is None or theirs is None or not flag or theirs.sums or theirs.count != mine.count:
                continue
            a, b = groups.of[p], groups.of[i]
            if _alike(program.equations[p], e) and groups.can_merge(a, b) and _by_items_only(groups, local, a, b):
                groups.merge(a, b)
    return groups.rewritten(partial(fuse, items_p))


def _alike(a: Equation, b: Equation) -> bool:
    """One phase each; but the loss and its gradient are one thing."""
    return a.phase == b.phase or a.scope == b.scope == "loss"


def _by_items_only(groups: Groups, local: list[ByItem | None], a: int, b: int) -> bool:
    """Whether what one of two groups reads of the other it reads item by item."""
    members = groups.members[a] + groups.members[b]
    for i in members:
        mine = local[i]
        assert mine is not None
        for v, flag in zip(groups.equations[i].inputs, mine.flags, strict=True):
            p = groups.producer.get(v)
            if p in members:
                theirs = local[p]
                assert theirs is not None
                if not flag or theirs.sums:
                    return False
    return True
