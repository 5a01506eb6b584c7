"""Convolutions and poolings of images that are channels last (NHWC).

The pass `channels_last` replaces operations on NCHW by these. It runs after differentiation, so they have no
derivatives.

Convolutions are matrix products of pixels. A matrix has a row for each pixel of the images and a column for each
channel. With y = x * w these are im2col products:

y (N OH OW, O) = windows of x (N OH OW, KH KW C)    times    w (O, KH KW C) transposed

An operand is one array of bfloat16, or the sum of several: its terms. The first term of a float32 number is the number
rounded to bfloat16, the next one is the rest, rounded. Three terms hold all 24 bits, two hold more than the 11 of tf32.
Kernels leave out the products of terms that are too small to matter. In tf32 an operand may also be one array of
float32, which the kernel rounds. The kernel takes such operands only if their rows are along K. So the filters of an
input gradient are (C, KH, KW, O), and there is no weight gradient. Depthwise convolutions are not such products; their
operands may also be float32 that is not rounded. With several groups the filters are (O, KH, KW, C / groups).

Positions of maxima are bytes where windows are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import prod
from typing import Any

import numpy as np

from adtrain.core.precision import FLOAT32, FULL, TERMS, TF32, rounded
from adtrain.core.primitive import CHANNELS_LAST, Primitive, Trait
from adtrain.core.types import NCHW, NHWC, ArrayType, permuted
from adtrain.ops.bfloat16 import as_float32, from_bits
from adtrain.ops.conv import conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.pool import Windows, avg_pool2d_p, avg_pool2d_put_p, max_pool2d_p, max_pool2d_pick_p, max_pool2d_put_p


def _convolution(of: Primitive, pixels: bool, axes: tuple[str, str, str], operand_format: str) -> Primitive:
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
    _convolution(conv2d_p, True, ("....", "o...", ".o"), _format)  # (x: (N, H, W, C), w: (O, KH, KW, C); window)
    _convolution(input_grad_p, True, ("....", "...c", ".c"), _format)  # (g: (N, OH, OW, O), w; window, size = (H, W))
    if _format != TF32:
        _convolution(weight_grad_p, False, ("....", "...o", "o."), _format)  # (x, g; window, size = (KH, KW))


def _positions_type(windows: Windows) -> np.dtype:
    """The type of positions in windows: bytes count up to 256 elements."""
    return np.dtype(np.uint8 if prod(windows.kernel) <= 256 else np.int32)


def _channels_first(params: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**params, "shape": permuted(params["shape"], NCHW)} if "shape" in params else params


def _pooling(of: Primitive, axes: str) -> Primitive:
    """`of`, a pooling or gradient of one, for arrays that are channels last; for ``axes`` see `Primitive`."""

    def types(*inputs: Any, **params: Any) -> tuple[ArrayType, ...]:
        images = [ArrayType(permuted(x.shape, NCHW), x.dtype) for x in inputs]
        first, *positions = of.output_types(images, _channels_first(params))
        found = [ArrayType(x.shape, _positions_type(params["windows"])) for x in positions]
        return tuple(ArrayType(permuted(x.shape, NHWC), x.dtype) for x in (first, *found))

    def reference(*inputs: np.ndarray, **params: Any) -> Any:
        found = of.reference(*(x.transpose(NCHW) for x in inputs), **_channels_first(params))
        first, *positions = found if isinstance(found, tuple) else (found,)
        values = [first, *(x.astype(_positions_type(params["windows"])) for x in positions)]
        results = tuple(np.ascontiguousarray(x.transpose(NHWC)) for x in values)
        return results if positions else results[0]

    def flops(*inputs: Any, **params: Any) -> int:
        images = [ArrayType(permuted(x.shape, NCHW), x.dtype) for x in inputs]
        return of.cost(images, _channels_first(params)).flops

    return Primitive(of.name + CHANNELS_LAST, types, reference, flops=flops, axes=axes)


max_pool2d_last_p = _pooling(max_pool2d_p, "n..c->n..c,n..c")
"""(x: (N, H, W, C); windows) to the maxima and their positions, (N, OH, OW, C)."""
max_pool2d_put_last_p = _pooling(max_pool2d_put_p, "n..c,n..c->n..c")
"""(ct, where: (N, OH, OW, C); windows, shape) to (N, H, W, C), which is the shape."""
max_pool2d_pick_last_p = _pooling(max_pool2d_pick_p, "n..c,n..c->n..c")
"""(x: (N, H, W, C), where: (N, OH, OW, C); windows) to (N, OH, OW, C)."""
avg_pool2d_last_p = _pooling(avg_pool2d_p, "n..c->n..c")
"""(x: (N, H, W, C); windows) to (N, OH, OW, C)."""
avg_pool2d_put_last_p = _pooling(avg_pool2d_put_p, "n..c->n..c")
"""(ct: (N, OH, OW, C); windows, shape) to (N, H, W, C), which is the shape."""
