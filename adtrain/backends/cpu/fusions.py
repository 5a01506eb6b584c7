"""The passes that fuse equations for the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from adtrain.backends.cpu.forms.batchwise import BatchwiseFusion, LargeProductFusion, item_kernel
from adtrain.core.primitive import Trait
from adtrain.core.program import HORIZONTAL, LOOPS, PRODUCT, Equation
from adtrain.core.staging import Pass
from adtrain.passes import SIMPLIFY
from adtrain.passes.dead_code import remove_dead_code
from adtrain.passes.flatten_rows import flatten_rows
from adtrain.passes.fold_transposes import fold_transposes
from adtrain.passes.fuse_elementwise import ElementwiseFusion, by_element
from adtrain.passes.fuse_map_reduce import fuse_map_reduce
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.fuse_products import fuse_product, reads_by_element
from adtrain.passes.fusion import Fusion, FusionPass, fusions_of_users
from adtrain.passes.groups import Groups
from adtrain.passes.keep_derivatives import keep_derivatives
from adtrain.passes.merge_added_products import merge_added_products
from adtrain.passes.readers_first import readers_first
from adtrain.passes.recompute import recompute
from adtrain.passes.stack_members import stack_all_members

HAVE_LOOPS = (BatchwiseFusion.form, PRODUCT)
"""Forms whose bodies have loops."""


class EpilogueLoopsFusion(ElementwiseFusion):
    """A loop nest for each connected group of elementwise equations of a shape and phase, and for a product's readers.

    All elementwise equations of a phase that read a product are one group. So they can be the epilogue of the product,
    which is not stored.
    """

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        for product in groups.equations:
            if product.has(Trait.MATMUL):
                (c,) = product.outputs
                by_phase: dict[str, list[int]] = {}
                for e in self.program.readers.get(c, ()):
                    if by_element(e) and reads_by_element(e, c):
                        by_phase.setdefault(e.phase, []).append(groups.producer[e.outputs[0]])
                yield from by_phase.values()


class UpdateFusion(Fusion):
    """The independent elementwise equations of the update, whatever their shapes."""

    form = HORIZONTAL

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        yield [i for i, e in enumerate(groups.equations) if _is_update(e)]


def _is_update(equation: Equation) -> bool:
    return equation.form == LOOPS and equation.phase == "update" and bool(equation.outputs[0].type.shape)


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
        FusionPass((EpilogueLoopsFusion,)),
        *(FusionPass((fusion,)) for fusion in fusions_of_users("cpu")),
        FusionPass((LargeProductFusion,)),
        FusionPass((BatchwiseFusion,)),
        fuse_product,
        partial(recompute, sources=HAVE_LOOPS, readers=HAVE_LOOPS),
        FusionPass((UpdateFusion,)),
        readers_first,
    )
