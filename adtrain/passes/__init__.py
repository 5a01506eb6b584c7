"""Passes: functions from a Program to a better Program that computes the same. One file each."""

from collections.abc import Sequence
from functools import partial

from adtrain.core.backend import backend
from adtrain.core.program import Program
from adtrain.core.staging import Pass
from adtrain.core.target import Target
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


def gpu_fusions(target: Target) -> Sequence[Pass]:
    """The passes that make one kernel launch of several equations, for a GPU."""
    return (
        sink_masks,
        partial(join_bias_gradients, target=target),
        keep_sums_pooled,
        partial(leave_out_spread_gradients, target=target),
        remove_dead_code,
        partial(join_bias_gradients, target=target),
        remove_dead_code,
        fuse_elementwise,
        loops_on_products,
        remove_dead_code,
        fuse_rows,
        fuse_products,
        fuse_convolutions,
        partial(fuse_pooling, target=target),
        fuse_gathers,
        fuse_blocks,
        partial(side_by_side, target=target),
        readers_first,
    )


def fuse(program: Program) -> Program:
    """The fusing passes of the device that the Program runs on."""
    variables = (*program.inputs, *program.constants, *program.outputs)
    device = next((v.device for v in variables if v.device != "cpu"), "cpu")
    return backend(device).fuse(program)


ALL = (*SIMPLIFY, fuse)

__all__ = [
    "ALL",
    "FUSE_CPU",
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
    "gpu_fusions",
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
