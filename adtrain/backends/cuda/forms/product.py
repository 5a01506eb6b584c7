"""Products and convolutions with bias, activation, or the mask on the input gradient as the epilogue.

The epilogue of a convolution may end with max pooling. The image before the pooling is never written. Kernels of files
compute all of these, and call the generated epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adtrain.backends.cuda.codegen.product import matmul_of
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.core.fused import OF_POOLED, PRODUCT, body_of, fuse
from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.target import Target
from adtrain.passes.fuse_products import EpilogueFusion
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups

CONV_POOL = "conv_pool"
"""A convolution with an elementwise epilogue and max pooling; only the pooled result is written."""

CONVOLUTION = "convolution"
"""A convolution, or its input gradient, with an elementwise epilogue."""


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


def _of_product(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    """The kernels of the product or convolution alone, which also take an epilogue."""
    product = matmul_of(equation)
    return cuda_kernels(product.name, target, *(v.type for v in product.inputs), **product.kernel_params)


def _of_pooled(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    """The kernels of a convolution that pool as well."""
    body = body_of(equation).equations
    return _pooling_kernels(body[0], body[-1], target)


def _pooling_kernels(convolution: Equation, pool: Equation, target: Target) -> Sequence[CudaKernel]:
    types = (v.type for v in convolution.inputs)
    return cuda_kernels(CONV_POOL, target, *types, **convolution.params, **pool.params)


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
    return bool(_pooling_kernels(product, pool, target))


define(Form(PRODUCT, candidates=_of_product, timed=matmul_of))
define(Form(CONVOLUTION, candidates=_of_product, timed=matmul_of))
define(Form(CONV_POOL, candidates=_of_pooled))
