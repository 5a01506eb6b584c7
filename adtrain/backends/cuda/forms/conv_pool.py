"""Pooling fusion: max pooling as the epilogue of a convolution. The image before the pooling is never written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adtrain.core.fused import CONV_POOL, CONVOLUTION, body_of, fuse
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.target import Target
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups


class PoolingFusion(Fusion):
    """A convolution and the max pooling that alone reads it, where a kernel for both should be faster than two."""

    form = CONV_POOL

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        pool = groups.equations[reader]
        alone = pool.has(Trait.MAX_POOL) and self.readers[value] == 1
        return alone and _has_kernel(groups.equations[producer], pool, self.target)

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        convolution, pool = equations
        return fuse(CONV_POOL, [*body_of(convolution).equations, pool], pool.outputs)


def _has_kernel(convolution: Equation, pool: Equation, target: Target) -> bool:
    if convolution.form not in ("", CONVOLUTION):
        return False
    product, *epilogue = body_of(convolution).equations
    computed = {v for e in (product, *epilogue) for v in e.outputs}
    operands = [v for e in epilogue for v in e.inputs if v not in computed]
    if any(math.prod(v.type.shape[-2:]) > 1 for v in operands):
        return False
    if product.name != "conv2d":
        return False
    types = (v.type for v in product.inputs)
    return bool(cuda_kernels(CONV_POOL, target, *types, **product.params, **pool.params))
