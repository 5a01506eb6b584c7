"""Passes: functions from a Program to a better Program that computes the same. One file each."""

from adtrain.core.program import Program
from adtrain.passes.bias_gradients import join_bias_gradients
from adtrain.passes.common_subexpressions import merge_common_subexpressions
from adtrain.passes.dead_code import remove_dead_code
from adtrain.passes.fold_constants import fold_constants
from adtrain.passes.fuse_blocks import fuse_blocks
from adtrain.passes.fuse_convolutions import fuse_convolutions
from adtrain.passes.fuse_elementwise import fuse_elementwise
from adtrain.passes.fuse_gathers import fuse_gathers
from adtrain.passes.fuse_items import fuse_items
from adtrain.passes.fuse_pooling import fuse_pooling
from adtrain.passes.fuse_products import fuse_products
from adtrain.passes.fuse_rows import fuse_rows
from adtrain.passes.loops_on_products import loops_on_products
from adtrain.passes.merge_updates import merge_updates
from adtrain.passes.plan_memory import MemoryPlan, plan_memory
from adtrain.passes.pooled_gradients import (
    keep_gradients_pooled,
    keep_sums_pooled,
    leave_out_spread_gradients,
    sink_masks,
)
from adtrain.passes.readers_first import readers_first
from adtrain.passes.side_by_side import side_by_side
from adtrain.passes.simplify_reshapes import simplify_reshapes

SIMPLIFY = (fold_constants, simplify_reshapes, merge_common_subexpressions, remove_dead_code)
"""The passes that leave out work without changing any number."""

FUSE_CPU = (
    sink_masks,
    keep_sums_pooled,
    keep_gradients_pooled,
    remove_dead_code,
    fuse_elementwise,
    fuse_products,
    fuse_items,
    merge_updates,
    readers_first,
)
"""The passes that make one function of several equations."""

FUSE_GPU = (
    sink_masks,
    join_bias_gradients,
    keep_sums_pooled,
    leave_out_spread_gradients,
    remove_dead_code,
    join_bias_gradients,
    remove_dead_code,
    fuse_elementwise,
    loops_on_products,
    remove_dead_code,
    fuse_rows,
    fuse_products,
    fuse_convolutions,
    fuse_pooling,
    fuse_gathers,
    fuse_blocks,
    side_by_side,
    readers_first,
)
"""The passes that make one launch of several equations."""


def fuse(program: Program) -> Program:
    """The fusing passes of the device that the Program runs on."""
    variables = (*program.inputs, *program.constants, *program.outputs)
    for improve in FUSE_CPU if all(v.device == "cpu" for v in variables) else FUSE_GPU:
        program = improve(program)
    return program


ALL = (*SIMPLIFY, fuse)

__all__ = [
    "ALL",
    "FUSE_CPU",
    "FUSE_GPU",
    "SIMPLIFY",
    "MemoryPlan",
    "fold_constants",
    "fuse",
    "fuse_blocks",
    "fuse_convolutions",
    "fuse_elementwise",
    "fuse_gathers",
    "fuse_items",
    "fuse_pooling",
    "fuse_products",
    "fuse_rows",
    "join_bias_gradients",
    "keep_gradients_pooled",
    "keep_sums_pooled",
    "leave_out_spread_gradients",
    "loops_on_products",
    "merge_common_subexpressions",
    "merge_updates",
    "plan_memory",
    "readers_first",
    "remove_dead_code",
    "side_by_side",
    "simplify_reshapes",
    "sink_masks",
]
