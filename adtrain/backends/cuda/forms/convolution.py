"""Convolutions with bias, activation, or the mask on the input gradient as the epilogue."""

from __future__ import annotations

import math

from adtrain.core.fused import CONVOLUTION, OF_POOLED, body_of
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation
from adtrain.passes.fuse_products import EpilogueFusion


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
