"""Convolutions of images that are bfloat16 in memory, channels last (NHWC), as matrix products of pixels.

A matrix has a row for each pixel of the images and a column for each channel. With y = x * w these are im2col products:

y (N OH OW, O) = windows of x (N OH OW, KH KW C)    times    w (O, KH KW C) transposed

The pass `channels_last` replaces convolutions of precision bfloat16 by these equations. It runs after differentiation,
so they have no derivatives. Window.groups is 1.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from adtrain.core.primitive import BFLOAT16, Primitive, Trait
from adtrain.core.types import NCHW, NHWC, ArrayType, permuted
from adtrain.ops.bfloat16 import as_float32, from_bits
from adtrain.ops.conv import conv2d_p, input_grad_p, weight_grad_p


def _of_images(of: Primitive, pixels: bool, axes: str) -> Primitive:
    """`of`, a convolution or gradient, for arrays of bfloat16 that are channels last.

    Args:
        pixels: whether the result is a matrix of pixels (N H W, C), else one of filters (O, KH KW C).
        axes: see `Primitive`.
    """
    name = of.name + BFLOAT16

    def images_first(x: Any) -> ArrayType:
        return ArrayType(permuted(as_float32(name, x).shape, NCHW), np.dtype(np.float32))

    def shape(*inputs: Any, **params: Any) -> ArrayType:
        n, c, *image = of.shape(*map(images_first, inputs), **params).shape
        return ArrayType((n * prod(image), c) if pixels else (n, prod(image) * c), np.dtype(np.float32))

    def reference(*inputs: np.ndarray, **params: Any) -> np.ndarray:
        result = of.reference(*(from_bits(x).transpose(NCHW) for x in inputs), **params).transpose(NHWC)
        return np.ascontiguousarray(result).reshape((-1, result.shape[-1]) if pixels else (result.shape[0], -1))

    def flops(*inputs: Any, **params: Any) -> int:
        return of.cost([images_first(x) for x in inputs], params).flops

    return Primitive(name, shape, reference, flops=flops, traits=(Trait.MATMUL,), axes=axes)


conv2d_bfloat16_p = _of_images(conv2d_p, pixels=True, axes="....,o...->.o")
"""(x: (N, H, W, C), w: (O, KH, KW, C); window, precision) to float32 (N OH OW, O)."""
input_grad_bfloat16_p = _of_images(input_grad_p, pixels=True, axes="....,...c->.c")
"""(g: (N, OH, OW, O), w: (O, KH, KW, C); window, size, precision) to float32 (N H W, C), size = (H, W)."""
weight_grad_bfloat16_p = _of_images(weight_grad_p, pixels=False, axes="....,...o->o.")
"""(x: (N, H, W, C), g: (N, OH, OW, O); window, size, precision) to float32 (O, KH KW C), size = (KH, KW)."""
