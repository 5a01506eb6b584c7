"""Operations that passes put in place of others: on arrays of bfloat16, and on images that are channels last (NHWC).

The passes `store_bfloat16` and `channels_last` run after differentiation, so these operations have no derivatives. An
element of bfloat16 is its 16 bits as a uint16 (`core.types.BITS`).

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

from adtrain.core.errors import DTypeError
from adtrain.core.precision import FLOAT32, FULL, TERMS, TF32, rounded
from adtrain.core.primitive import CHANNELS_LAST, Primitive, Trait
from adtrain.core.types import BITS, NCHW, NHWC, ArrayType, permuted
from adtrain.ops.conv import conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.matmul import matmul_p
from adtrain.ops.pool import Windows, avg_pool2d_p, avg_pool2d_put_p, max_pool2d_p, max_pool2d_pick_p, max_pool2d_put_p

SINGLE = np.dtype(np.float32)


def _converted_type(name: str, x: Any, source: np.dtype, target: np.dtype) -> ArrayType:
    if x.dtype != source:
        raise DTypeError(f"{name}: found {x.dtype}, expected {source}")
    return ArrayType(x.shape, target)


def _to_bits(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, SINGLE)
    bits = rounded(x, "bfloat16").view(np.uint32) >> np.uint32(16)
    return np.where(np.isnan(x), bits | np.uint32(0x40), bits).astype(BITS)


def from_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32 numbers."""
    return (x.astype(np.uint32) << np.uint32(16)).view(SINGLE)


to_bfloat16_p = Primitive(
    "to_bfloat16",
    lambda x: _converted_type("to_bfloat16", x, SINGLE, BITS),
    _to_bits,
    expression="bfloat16_bits(a)",
)
"""(x): float32 rounded to the nearest bfloat16, ties to even, as its bits."""

from_bfloat16_p = Primitive(
    "from_bfloat16",
    lambda x: _converted_type("from_bfloat16", x, BITS, SINGLE),
    from_bits,
    expression="bfloat16_value(a)",
    traits=(Trait.WIDENING,),
)
"""(x): bfloat16 bits as float32 numbers, exactly."""


bfloat16_rest_p = Primitive(
    "bfloat16_rest",
    lambda x, bits: _converted_type("bfloat16_rest", x, SINGLE, SINGLE),
    lambda x, bits: np.subtract(x, from_bits(bits), dtype=SINGLE),
    expression="a - bfloat16_value(b)",
)
"""(x, bits): float32 numbers minus what they are as bfloat16, exactly."""


def as_float32(name: str, x: Any) -> ArrayType:
    """The type of an array of bfloat16 bits after its conversion to float32.

    Raises:
        DTypeError: it has another type; `name` names the operation.
    """
    return _converted_type(name, x, BITS, SINGLE)


def _as_float32(x: Any) -> ArrayType:
    return as_float32("matmul_bfloat16", x)


matmul_bfloat16_p = Primitive(
    "matmul_bfloat16",
    lambda a, b, **params: matmul_p.shape(_as_float32(a), _as_float32(b), **params),
    lambda a, b, **params: matmul_p.reference(from_bits(a), from_bits(b), **params),
    flops=lambda a, b, **params: matmul_p.cost([_as_float32(a), _as_float32(b)], params).flops,
    traits=(Trait.MATMUL,),
    axes=matmul_p.axes,
)
"""(a, b; transpose_a, transpose_b, precision): the float32 product of bfloat16 matrices. precision is "bfloat16"."""


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
