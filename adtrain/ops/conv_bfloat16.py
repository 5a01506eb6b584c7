"""Convolutions of images that are bfloat16 in memory, channels last (NHWC), as matrix products of pixels.

A matrix has a row for each pixel of the images and a column for each channel. With y = x * w these are im2col products:

y (N OH OW, O) = windows of x (N OH OW, KH KW C)    times    w (O, KH KW C) transposed

An operand is one array, or the sum of several: its terms. The first term of a float32 number is the number rounded to
bfloat16, the next one is the rest, rounded. Three terms hold all 24 bits, two hold more than the 11 of tf32. Kernels
leave out the products of terms that are too small to matter.

The pass `channels_last` replaces convolutions by these equations. It runs after differentiation, so they have no
derivatives. Window.groups is 1.
"""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any

import numpy as np

from adtrain.core.precision import FULL
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.types import NCHW, NHWC, ArrayType, permuted
from adtrain.ops.bfloat16 import as_float32, from_bits
from adtrain.ops.conv import conv2d_p, input_grad_p, weight_grad_p

TERMS = {"bfloat16": 1, "bf16x2": 2, "bf16x3": 3}
"""The terms of an operand, by the end of a primitive's name, which is its parameter ``precision`` too."""
OF_PRECISION = {"bfloat16": "bfloat16", "tf32": "bf16x2", FULL: "bf16x3"}
"""Which of TERMS compute a convolution, by its precision."""


def _of_images(of: Primitive, pixels: bool, axes: tuple[str, str, str], terms: str) -> Primitive:
    """`of`, a convolution or gradient, for arrays of bfloat16 that are channels last.

    Args:
        pixels: whether the result is a matrix of pixels (N H W, C), else one of filters (O, KH KW C).
        axes: those of a term of each operand, and of the result; see `Primitive`.
        terms: one of TERMS.
    """
    name, count = f"{of.name}_{terms}", TERMS[terms]

    def images_first(x: Any) -> ArrayType:
        return ArrayType(permuted(as_float32(name, x).shape, NCHW), np.dtype(np.float32))

    def operands(*inputs: Any) -> list[ArrayType]:
        return [images_first(x) for x in inputs[::count]]

    def shape(*inputs: Any, **params: Any) -> ArrayType:
        n, c, *image = of.shape(*operands(*inputs), **params).shape
        return ArrayType((n * prod(image), c) if pixels else (n, prod(image) * c), np.dtype(np.float32))

    def reference(*inputs: np.ndarray, **params: Any) -> np.ndarray:
        terms = [from_bits(x).transpose(NCHW) for x in inputs]
        sums = [reduce(np.add, reversed(terms[i : i + count])) for i in range(0, len(terms), count)]
        result = of.reference(*sums, **{**params, "precision": FULL}).transpose(NHWC)
        return np.ascontiguousarray(result).reshape((-1, result.shape[-1]) if pixels else (result.shape[0], -1))

    def flops(*inputs: Any, **params: Any) -> int:
        return of.cost(operands(*inputs), params).flops

    labels = ",".join([axes[0]] * count + [axes[1]] * count) + "->" + axes[2]
    return Primitive(name, shape, reference, flops=flops, traits=(Trait.MATMUL,), axes=labels)


for _terms in TERMS:
    _of_images(conv2d_p, True, ("....", "o...", ".o"), _terms)  # (x: (N, H, W, C), w: (O, KH, KW, C); window)
    _of_images(input_grad_p, True, ("....", "...c", ".c"), _terms)  # (g: (N, OH, OW, O), w; window, size = (H, W))
    _of_images(weight_grad_p, False, ("....", "...o", "o."), _terms)  # (x, g; window, size = (KH, KW))
