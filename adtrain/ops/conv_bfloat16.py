"""Convolutions of images that are channels last (NHWC), as matrix products of pixels.

A matrix has a row for each pixel of the images and a column for each channel. With y = x * w these are im2col products:

y (N OH OW, O) = windows of x (N OH OW, KH KW C)    times    w (O, KH KW C) transposed

An operand is one array of bfloat16, or the sum of several: its terms. The first term of a float32 number is the number
rounded to bfloat16, the next one is the rest, rounded. Three terms hold all 24 bits, two hold more than the 11 of tf32.
Kernels leave out the products of terms that are too small to matter. In tf32 an operand may also be one array of
float32, which the kernel rounds. The kernel takes such operands only if their rows are along K. So the filters of an
input gradient are (C, KH, KW, O), and there is no weight gradient. Depthwise convolutions are not such products; their
operands may also be float32 that is not rounded.

The pass `channels_last` replaces convolutions by these equations. It runs after differentiation, so they have no
derivatives. With several groups the filters are (O, KH, KW, C / groups), as in `ops.conv`.
"""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any

import numpy as np

from adtrain.core.precision import FLOAT32, FULL, TERMS, TF32
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.types import NCHW, NHWC, ArrayType, permuted
from adtrain.ops.bfloat16 import as_float32, from_bits
from adtrain.ops.conv import conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.rounding import rounded


def _of_images(of: Primitive, pixels: bool, axes: tuple[str, str, str], operand_format: str) -> Primitive:
    """`of`, a convolution or gradient, for arrays that are channels last.

    Args:
        pixels: whether the result is a matrix of pixels (N H W, C), else one of filters (O, KH KW C).
        axes: those of a term of each operand, and of the result; see `Primitive`.
        operand_format: one of TERMS. The name of the primitive ends with it, and its parameter ``precision`` is equal.
    """
    name, count = f"{of.name}_{operand_format}", TERMS[operand_format]
    float32 = np.dtype(np.float32)
    by_filter = of is input_grad_p and operand_format == TF32
    orders = NCHW, (3, 0, 1, 2) if by_filter else NCHW

    def operands(*inputs: Any) -> list[ArrayType]:
        types = [x if operand_format in (TF32, FLOAT32) else as_float32(name, x) for x in inputs[::count]]
        return [ArrayType(permuted(x.shape, order), float32) for x, order in zip(types, orders, strict=True)]

    def shape(*inputs: Any, **params: Any) -> ArrayType:
        n, c, *image = of.shape(*operands(*inputs), **params).shape
        return ArrayType((n * prod(image), c) if pixels else (n, prod(image) * c), float32)

    def number(x: np.ndarray) -> np.ndarray:
        """An array as the kernel multiplies it."""
        if operand_format == FLOAT32:
            return x
        return rounded(x, TF32) if operand_format == TF32 else from_bits(x)

    def reference(*inputs: np.ndarray, **params: Any) -> np.ndarray:
        arrays = list(map(number, inputs))
        sums = [reduce(np.add, reversed(arrays[i : i + count])) for i in range(0, len(arrays), count)]
        first = (x.transpose(order) for x, order in zip(sums, orders, strict=True))
        result = of.reference(*first, **{**params, "precision": FULL}).transpose(NHWC)
        return np.ascontiguousarray(result).reshape((-1, result.shape[-1]) if pixels else (result.shape[0], -1))

    def flops(*inputs: Any, **params: Any) -> int:
        return of.cost(operands(*inputs), params).flops

    of_filters = axes[1][::-1] if by_filter else axes[1]

    def labels(*inputs: Any, window: Any, **params: Any) -> str:
        by_channel = of is not input_grad_p or window.groups == 1
        x, w, out = (axes[0], of_filters, axes[2]) if by_channel else ("....", "....", "..")
        return ",".join([x] * count + [w] * count) + "->" + out

    return Primitive(name, shape, reference, flops=flops, traits=(Trait.MATMUL,), axes=labels)


for _format in TERMS:
    _of_images(conv2d_p, True, ("....", "o...", ".o"), _format)  # (x: (N, H, W, C), w: (O, KH, KW, C); window)
    _of_images(input_grad_p, True, ("....", "...c", ".c"), _format)  # (g: (N, OH, OW, O), w; window, size = (H, W))
    if _format != TF32:
        _of_images(weight_grad_p, False, ("....", "...o", "o."), _format)  # (x, g; window, size = (KH, KW))
