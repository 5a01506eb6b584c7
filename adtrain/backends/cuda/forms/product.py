"""Products and convolutions with bias, activation, or the mask on the input gradient as the epilogue.

The epilogue of a convolution may end with max pooling. The image before the pooling is never written. Kernels of files
compute all of these, and call the generated epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adtrain.backends.cuda.codegen.loops import epilogue_bytes, matmul_of
from adtrain.backends.cuda.forms import Form, define
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels
from adtrain.core.primitive import Trait
from adtrain.core.program import OF_POOLED, PRODUCT, Equation, Variable, body_of, fuse
from adtrain.lowering.cuda.gemm import bfloat16
from adtrain.passes.fusion import EpilogueFusion
from adtrain.passes.groups import Groups

CONV_POOL = "conv_pool"
"""A convolution with an elementwise epilogue and max pooling; only the pooled result is written."""

CONVOLUTION = "convolution"
"""A convolution, or its input gradient, with an elementwise epilogue."""


class ConvolutionFusion(EpilogueFusion):
    """A convolution, or its input gradient (also of a pooled gradient), with an epilogue.

    If only a max pooling reads the epilogue, it becomes the last part, where one kernel should be faster than two.
    """

    form = CONVOLUTION

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        """Batching rules compute the convolutions of a Program by member."""
        return not target.by_member

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        """Each input of the epilogue has the shape of the images, or one value for a whole channel."""
        shape = epilogue.outputs[0].type.shape
        by_channel = all(v.type.shape == shape or math.prod(v.type.shape[-2:]) == 1 for v in epilogue.inputs)
        computing = body_of(product).equations[-1]
        own = product is computing or product.form == computing.name + OF_POOLED
        return own and computing.has(Trait.CONVOLUTION) and by_channel

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        pool = groups.equations[reader]
        if not pool.has(Trait.MAX_POOL):
            return super().joins(groups, producer, reader, value)
        convolution, *epilogue = members = groups.group_of(producer)
        if not _can_pool(convolution, epilogue) or any(self._is_read_outside(e, [*epilogue, pool]) for e in members):
            return False
        return bool(_pooling_kernels(convolution, pool, self.target))

    def _is_read_outside(self, e: Equation, readers: Sequence[Equation]) -> bool:
        """Whether the Program returns a result of an equation, or equations that are not ``readers`` read it."""
        read = (self.program.readers.get(v, ()) for v in e.outputs)
        return not {*self.program.outputs}.isdisjoint(e.outputs) or any(x not in readers for xs in read for x in xs)

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        return fuse(CONV_POOL if equations[-1].has(Trait.MAX_POOL) else CONVOLUTION, equations, needed)


def _can_pool(convolution: Equation, epilogue: Sequence[Equation]) -> bool:
    """Whether it is a convolution whose epilogue reads one value for a whole channel, besides its result."""
    computed = {v for e in (convolution, *epilogue) for v in e.outputs}
    operands = [v for e in epilogue for v in e.inputs if v not in computed]
    return convolution.name == "conv2d" and all(math.prod(v.type.shape[-2:]) == 1 for v in operands)


def _of_product(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    """The kernels of the product or convolution alone, which also take an epilogue."""
    product = matmul_of(equation)
    if product.name == "matmul_bfloat16":
        a, b = product.inputs
        return bfloat16.candidates(target, a.type, b.type, **product.kernel_params, epilogue=epilogue_bytes(equation))
    return cuda_kernels(product.name, target, *(v.type for v in product.inputs), **product.kernel_params)


def _of_pooled(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    """The kernels of a convolution that pool as well."""
    body = body_of(equation).equations
    return _pooling_kernels(body[0], body[-1], target)


def _pooling_kernels(convolution: Equation, pool: Equation, target: Target) -> Sequence[CudaKernel]:
    types = (v.type for v in convolution.inputs)
    return cuda_kernels(CONV_POOL, target, *types, **convolution.params, **pool.params)


define(Form(PRODUCT, candidates=_of_product, timed=matmul_of, converts=True))
define(Form(CONVOLUTION, candidates=_of_product, timed=matmul_of, converts=True))
define(Form(CONV_POOL, candidates=_of_pooled))
