"""The passes that fuse equations for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from adtrain.backends.cuda.channels_last import channels_last
from adtrain.backends.cuda.forms import LAUNCH_BYTES, kernel_form
from adtrain.backends.cuda.forms.column_sum import COLUMN_SUM, ColumnSumFusion
from adtrain.backends.cuda.forms.gather import GatherFusion
from adtrain.backends.cuda.forms.grouped_products import GroupedBfloat16Fusion, GroupedProductsFusion
from adtrain.backends.cuda.forms.horizontal import HorizontalFusion, is_product
from adtrain.backends.cuda.forms.one_block import OneBlockFusion
from adtrain.backends.cuda.forms.product import CONVOLUTION, ConvolutionFusion
from adtrain.backends.cuda.forms.product_sums import PRODUCT_SUMS, ProductSumsFusion
from adtrain.backends.cuda.forms.reduction import ReductionFusion, compute_arguments, split_reductions
from adtrain.backends.cuda.forms.resident_steps import fuse_resident_steps
from adtrain.backends.cuda.forms.row_chain import RowChainFusion
from adtrain.backends.cuda.forms.row_fused import LongRowsFusion, RowFusedFusion
from adtrain.backends.cuda.forms.row_products import RowProductsFusion
from adtrain.backends.cuda.forms.streamed_layer import fuse_layer_backward, stream_layer
from adtrain.backends.cuda.forms.thread_items import ThreadItemsFusion, WideProductFusion
from adtrain.backends.cuda.forms.tiled_product import tile_weights
from adtrain.backends.cuda.forms.weight_gradients import fuse_bias_gradients, fuse_recurrent_gradients
from adtrain.backends.cuda.narrow_values import narrow_values
from adtrain.backends.cuda.product_precision import choose_precision, store_bfloat16
from adtrain.backends.cuda.shared_divisors import multiply_by_reciprocals
from adtrain.core.batching_rules import loop
from adtrain.core.kernel import Target, cuda_kernels
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.program import PRODUCT, Equation, Program
from adtrain.core.staging import Pass, Results, keeps
from adtrain.core.vmap import batching_rule
from adtrain.passes.fuse_map_reduce import fuse_map_reduce
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.fusion import FusionPass, fuse_loops, fuse_product, fusions_of_users, is_loops
from adtrain.passes.order import readers_first
from adtrain.passes.products import (
    add_before_products,
    flatten_rows,
    fold_transposes,
    merge_added_products,
    sink_reshapes,
)
from adtrain.passes.recompute import keep_derivatives, recompute
from adtrain.passes.simplify import remove_dead_code
from adtrain.passes.stack_members import stack_members


def gpu_fusions(target: Target) -> Sequence[Pass]:
    """The passes that fuse several equations into one kernel launch, for a GPU."""

    def has_kernel(e: Equation) -> bool:
        return bool(cuda_kernels(e.name, target, *(v.type for v in e.inputs), **e.kernel_params))

    if target.by_member:  # without the passes that decide by the sizes of arrays
        return (
            flatten_rows,
            remove_dead_code,
            fuse_loops,
            *_fusions_of_loops(target),
            partial(by_batching_rules, target=target),
            partial(_fuse_layers, target=target),
        )
    return (
        fold_transposes,
        add_before_products,
        merge_added_products,
        partial(channels_last, target=target),
        partial(fuse_recurrent_gradients, target=target),
        flatten_rows,
        partial(choose_precision, target=target),
        partial(store_bfloat16, target=target),
        fuse_map_reduce,
        remove_dead_code,
        partial(fuse_bias_gradients, target=target),
        partial(fuse_maxpool_gradients, has_kernel=has_kernel, all_readers=True),
        remove_dead_code,
        partial(fuse_bias_gradients, target=target),
        multiply_by_reciprocals,
        remove_dead_code,
        keep_derivatives,
        fuse_loops,
        *(FusionPass((fusion,), target) for fusion in fusions_of_users("cuda")),
        *_fusions_of_loops(target),
        partial(narrow_values, target=target),
    )


BY_ROWS = (
    RowChainFusion,
    ThreadItemsFusion,
    ReductionFusion,
    RowProductsFusion,
    ColumnSumFusion,
    RowFusedFusion,
    LongRowsFusion,
    WideProductFusion,
    ConvolutionFusion,
    GatherFusion,
)
"""Forms whose blocks take their own rows, columns or tiles through all equations.

`RowProductsFusion` copies reshapes for their readers, and then `ColumnSumFusion` shares some of the copies.
"""
COMPUTE_AGAIN = PRODUCT, CONVOLUTION, PRODUCT_SUMS, COLUMN_SUM
"""Forms whose loops compute values again from arrays that the kernel reads anyway."""
SIDE_BY_SIDE = GroupedBfloat16Fusion, GroupedProductsFusion, HorizontalFusion
"""Forms of independent equations."""


def _fusions_of_loops(target: Target) -> Sequence[Pass]:
    """The passes after the fusion of elementwise equations."""
    by_rows = FusionPass(BY_ROWS, target, LAUNCH_BYTES, "fuse_by_rows")
    split = partial(split_reductions, fuse=by_rows, launch_bytes=LAUNCH_BYTES)
    return (
        sink_reshapes,
        remove_dead_code,
        *(() if target.by_member else (compute_arguments, split)),
        by_rows,
        partial(tile_weights, target=target),
        FusionPass((ProductSumsFusion,), target),
        *(() if target.by_member else (partial(recompute, sources=(), readers=COMPUTE_AGAIN, more_arrays=False),)),
        FusionPass((OneBlockFusion,), target),
        FusionPass(SIDE_BY_SIDE, target, LAUNCH_BYTES, "fuse_side_by_side"),
        readers_first,
    )


@keeps(Results.ROUNDING)
def by_batching_rules(program: Program, target: Target) -> Program:
    """``program`` with batching rules for the equations that have no generated kernel.

    Recurrent networks run one member after another. Their batching rule would make one batch of the sequences of all
    members that share the weights, and the number of sequences decides on the kernel.
    """

    def rule_of(primitive: Primitive) -> Callable[..., object]:
        return loop if Trait.RECURRENT in primitive.traits else batching_rule(primitive)

    def stays(e: Equation) -> bool:
        return has_generated_kernel(e) or e.has(Trait.RESHAPE)

    of_rules = fuse_loops, sink_reshapes, remove_dead_code, fuse_product, FusionPass((GatherFusion,), target)
    return remove_dead_code(stack_members(program, stays, rule_of, of_rules))


@keeps(Results.EXACT)
def _fuse_layers(program: Program, target: Target) -> Program:
    """One equation for a whole step if the first layer fits on chip, else `streamed_layer` and `layer_backward`."""
    resident = fuse_resident_steps(program, target)
    if len(resident.equations) == 1:  # it fits
        return resident
    return readers_first(fuse_layer_backward(stream_layer(program, target), target))


def has_generated_kernel(equation: Equation) -> bool:
    """Whether a GPU computes an equation of one member by a generated kernel."""
    form = kernel_form(equation)
    return (form is not None and form.kernels is not None) or is_loops(equation) or is_product(equation)
