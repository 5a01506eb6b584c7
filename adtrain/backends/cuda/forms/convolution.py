"""Convolution fusion: bias, activation, or the mask on the input gradient as the epilogue of a convolution."""

from __future__ import annotations

import math

from adtrain.core.fused import CONVOLUTION
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program
from adtrain.passes.fuse_products import fuse_epilogues


def fuse_convolutions(program: Program) -> Program:
    """One `convolution` equation for a convolution and the elementwise equation that reads it."""
    return fuse_epilogues(
        program, CONVOLUTION, lambda product, reader: product.has(Trait.CONVOLUTION) and _by_channel(reader)
    )


def _by_channel(equation: Equation) -> bool:
    """Whether each input has the shape of the images, or one value for a whole channel."""
    shape = equation.outputs[0].type.shape
    return all(v.type.shape == shape or math.prod(v.type.shape[-2:]) == 1 for v in equation.inputs)
