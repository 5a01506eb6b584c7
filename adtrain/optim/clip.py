"""Gradient clipping."""

from __future__ import annotations

from functools import reduce

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.errors import OptionError
from adtrain.optim.optimizer import Tree


def clip_by_norm(grads: Tree, max_norm: float) -> tuple[Tree, Value]:
    """The gradients, scaled down to the norm `max_norm` where theirs is larger, and their norm (0-d) before.

    The norm is Euclidean, over all leaves as one vector (Pascanu et al. 2013); torch.nn.utils.clip_grad_norm_.
    """
    if not max_norm > 0:
        raise OptionError(f"clip_by_norm: max_norm is {max_norm!r}, expected a number above 0")
    leaves = tree.leaves(grads)
    if not leaves:
        raise OptionError("clip_by_norm: there are no gradients")
    norm = ops.sqrt(reduce(ops.add, [ops.sum(ops.square(g)) for g in leaves]))
    scale = ops.minimum(max_norm / (norm + 1e-6), 1.0)  # 1e-6 as in PyTorch: no division by a norm of zero
    return tree.map(lambda g: ops.astype(scale, g.dtype) * g, grads), norm


def clip_by_value(grads: Tree, limit: float) -> Tree:
    """The gradients with every element brought into [-limit, limit]."""
    if not limit > 0:
        raise OptionError(f"clip_by_value: limit is {limit!r}, expected a number above 0")
    return tree.map(lambda g: ops.clip(g, -limit, limit), grads)
