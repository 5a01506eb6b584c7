"""Passes: functions from a Program to a better Program that computes the same. One file each."""

from adtrain.passes.common_subexpressions import merge_common_subexpressions
from adtrain.passes.dead_code import remove_dead_code
from adtrain.passes.fold_constants import fold_constants
from adtrain.passes.fuse_elementwise import fuse_elementwise
from adtrain.passes.fuse_items import fuse_items
from adtrain.passes.fuse_products import fuse_products
from adtrain.passes.merge_updates import merge_updates
from adtrain.passes.plan_memory import MemoryPlan, plan_memory
from adtrain.passes.pooled_gradients import keep_gradients_pooled, sink_masks
from adtrain.passes.readers_first import readers_first
from adtrain.passes.simplify_reshapes import simplify_reshapes

SIMPLIFY = (fold_constants, simplify_reshapes, merge_common_subexpressions, remove_dead_code)
"""The passes that leave out work without changing any number."""

FUSE = (
    sink_masks,
    keep_gradients_pooled,
    remove_dead_code,
    fuse_elementwise,
    fuse_products,
    fuse_items,
    merge_updates,
    readers_first,
)
"""The passes that make one kernel of several equations. A GPU makes one of elementwise equations; its kernels for
products, convolutions and pooling stand alone."""

ALL = (*SIMPLIFY, *FUSE)

__all__ = [
    "ALL",
    "FUSE",
    "SIMPLIFY",
    "MemoryPlan",
    "fold_constants",
    "fuse_elementwise",
    "fuse_items",
    "fuse_products",
    "keep_gradients_pooled",
    "merge_common_subexpressions",
    "merge_updates",
    "plan_memory",
    "readers_first",
    "remove_dead_code",
    "simplify_reshapes",
    "sink_masks",
]
