"""Passes: functions from a Program to a better Program with the same results. One file each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from adtrain.core.backend import backend
from adtrain.core.fused import CONV_POOL, CONVOLUTION
from adtrain.core.program import Equation, Program
from adtrain.core.registry import cuda_kernels
from adtrain.core.staging import Pass
from adtrain.core.target import Target
from adtrain.passes.batchwise import item_kernel
from adtrain.passes.choose_precision import choose_precision
from adtrain.passes.common_subexpressions import merge_common_subexpressions
from adtrain.passes.dead_code import remove_dead_code
from adtrain.passes.distribute_members import distribute_members
from adtrain.passes.flatten_rows import flatten_rows
from adtrain.passes.fold_collectives import fold_collectives
from adtrain.passes.fold_constants import fold_constants
from adtrain.passes.fuse_batchwise import fuse_batchwise
from adtrain.passes.fuse_bias_gradients import fuse_bias_gradients
from adtrain.passes.fuse_column_sums import fuse_column_sums
from adtrain.passes.fuse_convolutions import fuse_convolutions
from adtrain.passes.fuse_elementwise import fuse_elementwise, is_loops
from adtrain.passes.fuse_exchanges import fuse_exchanges
from adtrain.passes.fuse_gathers import fuse_gathers
from adtrain.passes.fuse_horizontally import fuse_horizontally, is_product
from adtrain.passes.fuse_layer_backward import fuse_layer_backward
from adtrain.passes.fuse_map_reduce import fuse_map_reduce
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.fuse_one_block import fuse_one_block
from adtrain.passes.fuse_pooling import fuse_pooling
from adtrain.passes.fuse_products import fuse_products
from adtrain.passes.fuse_recurrent_gradients import fuse_recurrent_gradients
from adtrain.passes.fuse_resident_steps import fuse_resident_steps
from adtrain.passes.fuse_row_products import fuse_row_products
from adtrain.passes.fuse_rows import fuse_rows
from adtrain.passes.fuse_updates import fuse_updates
from adtrain.passes.group_products import group_products
from adtrain.passes.join_horizontals import join_one_blocks
from adtrain.passes.keep_derivatives import keep_derivatives
from adtrain.passes.place_collectives import place_collectives
from adtrain.passes.place_views import place_views
from adtrain.passes.plan_memory import MemoryPlan, plan_memory
from adtrain.passes.readers_first import readers_first
from adtrain.passes.regions import optimize_regions
from adtrain.passes.share_member_launches import share_counters, share_first_launch
from adtrain.passes.simplify_reshapes import simplify_reshapes
from adtrain.passes.sink_reshapes import sink_reshapes
from adtrain.passes.store_bfloat16 import store_bfloat16
from adtrain.passes.stream_layer import stream_layer
from adtrain.passes.tile_weights import tile_weights

SIMPLIFY = (fold_collectives, fold_constants, simplify_reshapes, merge_common_subexpressions, remove_dead_code)
"""The passes that remove work without changing any bit of the results."""

FUSE_CPU = (
    flatten_rows,
    fuse_map_reduce,
    remove_dead_code,
    partial(fuse_maxpool_gradients, has_kernel=lambda e: item_kernel(e) is not None, all_readers=False),
    remove_dead_code,
    keep_derivatives,
    fuse_elementwise,
    fuse_products,
    fuse_batchwise,
    fuse_updates,
    readers_first,
)
"""The passes that fuse several equations into one function, for the CPU."""


def gpu_fusions(target: Target) -> Sequence[Pass]:
    """The passes that fuse several equations into one kernel launch, for a GPU."""

    def has_kernel(e: Equation) -> bool:
        return bool(cuda_kernels(e.primitive.name, target, *(v.type for v in e.inputs), **e.params))

    if target.by_member:  # the others decide by the sizes of arrays
        return (
            partial(distribute_members, fusions=(*SIMPLIFY, *_member_fusions(target)), generated=has_generated_kernel),
            remove_dead_code,
            fuse_elementwise,
            sink_reshapes,
            remove_dead_code,
            fuse_products,
            fuse_gathers,
            share_first_launch,
            partial(_fuse_layers, target=target),
        )
    return (
        flatten_rows,
        partial(choose_precision, target=target),
        partial(store_bfloat16, target=target),
        partial(fuse_recurrent_gradients, target=target),
        fuse_map_reduce,
        remove_dead_code,
        partial(fuse_bias_gradients, target=target),
        partial(fuse_maxpool_gradients, has_kernel=has_kernel, all_readers=True),
        remove_dead_code,
        partial(fuse_bias_gradients, target=target),
        remove_dead_code,
        keep_derivatives,
        fuse_elementwise,
        sink_reshapes,
        remove_dead_code,
        fuse_column_sums,
        partial(fuse_row_products, target=target),
        fuse_rows,
        fuse_products,
        partial(tile_weights, target=target),
        fuse_convolutions,
        partial(fuse_pooling, target=target),
        fuse_gathers,
        fuse_one_block,
        partial(group_products, target=target),
        partial(fuse_horizontally, target=target),
        readers_first,
    )


def _fuse_layers(program: Program, target: Target) -> Program:
    """The last passes of a Program by member. If its first layer fits on chip, a step is one equation.

    Otherwise, the first layer is streamed, and the gradients of other layers are fused with their updates.
    """
    resident = fuse_resident_steps(readers_first(share_counters(program)), target)
    if len(resident.equations) == 1:  # it fits
        return resident
    return readers_first(share_counters(fuse_layer_backward(stream_layer(program, target), target)))


def _member_fusions(target: Target) -> Sequence[Pass]:
    """The passes for the Program of one member: those whose kernels are generated."""
    return (
        flatten_rows,
        remove_dead_code,
        fuse_elementwise,
        sink_reshapes,
        remove_dead_code,
        fuse_column_sums,
        partial(fuse_row_products, target=target),
        fuse_rows,
        fuse_products,
        fuse_gathers,
        fuse_one_block,
        partial(fuse_horizontally, target=target),
        readers_first,
    )


def has_generated_kernel(equation: Equation) -> bool:
    """Whether a GPU computes an equation of one member by a generated kernel."""
    fused = equation.form not in ("", CONVOLUTION, CONV_POOL)
    return fused or is_loops(equation) or is_product(equation)


def by_member(program: Program) -> Program:
    """Mark a Program whose arrays have a leading axis of members: the bits of one must not depend on the others."""
    return replace(program, by_member=True)


def fuse(program: Program) -> Program:
    """``program`` after the fusion passes of the device that it runs on."""
    return backend(_device(program)).fuse(program)


def fuse_exchanges_of_device(program: Program) -> Program:
    """``program`` after `fuse_exchanges`, as far as its device runs them."""
    return fuse_exchanges(program, backend(_device(program)).fused_exchange_bytes())


def passes_of_ranks(passes: Sequence[Pass]) -> Sequence[Pass]:
    """The passes for a Program with exchanges. ``passes`` are applied to the parts between them."""
    optimize = partial(optimize_regions, passes=(*passes, join_one_blocks))
    return fold_collectives, optimize, fuse_exchanges_of_device, place_collectives_of_device, place_views


def place_collectives_of_device(program: Program) -> Program:
    """``program`` after `place_collectives`, with early updates where exchanges run beside kernels."""
    return place_collectives(program, backend(_device(program)).overlaps_exchanges)


def _device(program: Program) -> str:
    variables = (*program.inputs, *program.constants, *program.outputs)
    return next((v.device for v in variables if v.device != "cpu"), "cpu")


ALL = (*SIMPLIFY, fuse)
ALL_BY_MEMBER = (by_member, *ALL)

__all__ = [
    "ALL",
    "ALL_BY_MEMBER",
    "FUSE_CPU",
    "SIMPLIFY",
    "MemoryPlan",
    "by_member",
    "choose_precision",
    "flatten_rows",
    "fold_collectives",
    "fold_constants",
    "fuse",
    "fuse_batchwise",
    "fuse_bias_gradients",
    "fuse_column_sums",
    "fuse_convolutions",
    "fuse_elementwise",
    "fuse_exchanges",
    "fuse_gathers",
    "fuse_horizontally",
    "fuse_layer_backward",
    "fuse_map_reduce",
    "fuse_maxpool_gradients",
    "fuse_one_block",
    "fuse_pooling",
    "fuse_products",
    "fuse_recurrent_gradients",
    "fuse_resident_steps",
    "fuse_row_products",
    "fuse_rows",
    "fuse_updates",
    "gpu_fusions",
    "group_products",
    "join_one_blocks",
    "keep_derivatives",
    "merge_common_subexpressions",
    "optimize_regions",
    "passes_of_ranks",
    "place_collectives",
    "place_views",
    "plan_memory",
    "readers_first",
    "remove_dead_code",
    "simplify_reshapes",
    "sink_reshapes",
    "store_bfloat16",
    "stream_layer",
    "tile_weights",
]
