"""Gradient clipping."""

from __future__ import annotations

from functools import reduce

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.errors import OptionError
from adtrain.core.options import checked_options
from adtrain.optim.optimizer import Tree
from adtrain.option_types import Positive


@checked_options
def clip_by_norm(grads: Tree, max_norm: Positive, norm: Value | None = None) -> tuple[Tree, Value]:
    """The gradients scaled so that their norm is at most `max_norm`, and their norm before scaling (0-d).

    The norm is the Euclidean norm of all leaves as one vector (Pascanu et al. 2013), as in
    torch.nn.utils.clip_grad_norm_. With `norm`, `grads` are a part of the gradients that have this norm. Raises
    OptionError if `max_norm` is not above 0 or there are no gradients.
    """
    leaves = tree.leaves(grads)
    if not leaves:
        raise OptionError("clip_by_norm: found no gradients, expected at least one")
    if norm is None:
        norm = ops.sqrt(reduce(ops.add, [ops.sum(ops.square(g)) for g in leaves]))
    scale = ops.minimum(max_norm / (norm + 1e-6), 1.0)  # 1e-6 as in PyTorch: no division by a norm of zero
    return tree.map(lambda g: ops.astype(scale, g.dtype) * g, grads), norm


@checked_options
def clip_by_value(grads: Tree, limit: Positive) -> Tree:
    """The gradients with every element clamped to [-limit, limit]. Raises OptionError if `limit` is not above 0."""
    return tree.map(lambda g: ops.clip(g, -limit, limit), grads)
