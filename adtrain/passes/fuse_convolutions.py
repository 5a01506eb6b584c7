"""Convolution fusion: bias and activation of a layer, and the mask on the gradient by its images, are done to each
element before it is written.
"""

from __future__ import annotations

import math

from adtrain.core.fused import convolution_p
from adtrain.core.program import Equation, Program
from adtrain.passes.fuse_products import with_readers


def fuse_convolutions(program: Program) -> Program:
    """One `convolution` equation for a convolution and the elementwise equation that reads it."""
    return with_readers(program, convolution_p, lambda p, e: _is_convolution(p) and _by_channels(e))


def _is_convolution(equation: Equation) -> bool:
    return equation.primitive.name in ("conv2d", "conv2d_input_grad", "conv2d_input_grad_pooled")


def _by_channels(equation: Equation) -> bool:
    """Whether what it reads are images like its result, or the same for all elements of a channel."""
    shape = equation.outputs[0].type.shape
    return all(v.type.shape == shape or math.prod(v.type.shape[-2:]) == 1 for v in equation.inputs)
