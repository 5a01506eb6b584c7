"""The passes that fuse equations for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from adtrain.backends.cpu.forms.batchwise import BatchwiseFusion, LargeProductFusion, item_kernel
from adtrain.backends.cpu.forms.updates import UpdateFusion
from adtrain.core.staging import Pass
from adtrain.passes import SIMPLIFY
from adtrain.passes.dead_code import remove_dead_code
from adtrain.passes.flatten_rows import flatten_rows
from adtrain.passes.fold_transposes import fold_transposes
from adtrain.passes.fuse_elementwise import fuse_loops
from adtrain.passes.fuse_map_reduce import fuse_map_reduce
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.fuse_products import fuse_product
from adtrain.passes.fusion import FusionPass, fusions_of_users
from adtrain.passes.keep_derivatives import keep_derivatives
from adtrain.passes.merge_added_products import merge_added_products
from adtrain.passes.readers_first import readers_first
from adtrain.passes.stack_members import stack_all_members


def cpu_fusions(by_member: bool = False) -> Sequence[Pass]:
    """The passes that fuse several equations into one function, for the CPU.

    Batching rules compute a Program by member. A product over the rows of all members would depend on their number.
    """
    of_members = stack_all_members, *SIMPLIFY, fold_transposes
    first = of_members if by_member else (fold_transposes, merge_added_products, flatten_rows)
    return (
        *first,
        fuse_map_reduce,
        remove_dead_code,
        partial(fuse_maxpool_gradients, has_kernel=lambda e: item_kernel(e) is not None, all_readers=False),
        remove_dead_code,
        keep_derivatives,
        fuse_loops,
        *map(FusionPass, fusions_of_users("cpu")),
        FusionPass(LargeProductFusion),
        FusionPass(BatchwiseFusion),
        fuse_product,
        FusionPass(UpdateFusion),
        readers_first,
    )
