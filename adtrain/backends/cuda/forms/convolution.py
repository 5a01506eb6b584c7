"""Convolutions with bias, activation, or the mask on the input gradient as the epilogue.

Or with max pooling as the last part of the epilogue. The image before the pooling is never written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adtrain.core.fused import CONV_POOL, CONVOLUTION, OF_POOLED, body_of, fuse
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.target import Target
from adtrain.passes.fuse_products import EpilogueFusion
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups


class ConvolutionFusion(EpilogueFusion):
    """A convolution, or its input gradient (also of a pooled gradient), with an epilogue."""

    form = CONVOLUTION

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        """Each input of the epilogue has the shape of the images, or one value for a whole channel."""
        shape = epilogue.outputs[0].type.shape
        by_channel = all(v.type.shape == shape or math.prod(v.type.shape[-2:]) == 1 for v in epilogue.inputs)
        computing = body_of(product).equations[-1]
        own = product is computing or product.form == computing.name + OF_POOLED
        return own and computing.has(Trait.CONVOLUTION) and by_channel


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
