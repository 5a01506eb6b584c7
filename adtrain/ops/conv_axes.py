"""Convolution over one and three axes, by convolutions over two.

A signal of one axis is an image of one row. For three axes, each output plane is a convolution of one image, whose
channels are all input planes that the kernel covers. A transposed convolution computes the planes of each filter tap
and adds them at their positions in the output.
"""

from __future__ import annotations

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.core.trace import bind
from adtrain.ops.broadcasting import promote, reshape
from adtrain.ops.common import ArrayLike, as_value
from adtrain.ops.conv import check_output_padding, conv2d, conv_paddings, conv_transpose2d
from adtrain.ops.elementwise import add
from adtrain.ops.index import take
from adtrain.ops.shape import pad_p, slice, transpose
from adtrain.ops.windows import Ints, Padding, pad_image, per_axis


def conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Value:
    """`conv2d` of x (N, C, L) and weight (O, C / groups, K)."""
    x, weight = _with_axes("conv1d", 1, x, weight)
    (s,), (d,) = per_axis("conv1d", "stride", stride, 1), per_axis("conv1d", "dilation", dilation, 1)
    pads = conv_paddings("conv1d", padding, x.shape[2:], weight.shape[2:], (s,), (d,))
    out = conv2d(_with_row(x), _with_row(weight), bias, (1, s), ((0, 0), *pads), (1, d), groups)
    return _without_row(out)


def conv_transpose1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Value:
    """`conv_transpose2d` of x (N, C, L) and weight (C, O / groups, K)."""
    x, weight = _with_axes("conv_transpose1d", 1, x, weight)
    options = (("stride", stride), ("padding", padding), ("output_padding", output_padding), ("dilation", dilation))
    (s,), (p,), (e,), (d,) = (per_axis("conv_transpose1d", option, value, 1) for option, value in options)
    check_output_padding("conv_transpose1d", (e,), (s,))
    out = conv_transpose2d(_with_row(x), _with_row(weight), bias, (1, s), (0, p), (0, e), groups, (1, d))
    return _without_row(out)


def conv3d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Value:
    """`conv2d` of x (N, C, D, H, W) and weight (O, C / groups, KD, KH, KW)."""
    x, weight = _with_axes("conv3d", 3, x, weight)
    strides, dilations = per_axis("conv3d", "stride", stride, 3), per_axis("conv3d", "dilation", dilation, 3)
    depth, *plane = conv_paddings("conv3d", padding, x.shape[2:], weight.shape[2:], strides, dilations)
    x = pad_image(x, (depth, (0, 0), (0, 0)))
    n, c, d, h, w = x.shape
    o, c_w, kd, kh, kw = weight.shape
    rest = d - dilations[0] * (kd - 1) - 1
    if rest < 0 or kd < 1:
        raise ShapeError(f"conv3d: kernel depth {kd} (dilation {dilations[0]}) does not fit the padded depth {d}")
    count = rest // strides[0] + 1
    planes = strides[0] * np.arange(count)[:, None] + dilations[0] * np.arange(kd)
    covered = take(x, array(planes, device=x.device), 2)  # (N, C, OD, KD, H, W)
    images = reshape(transpose(covered, (0, 2, 1, 3, 4, 5)), (n * count, c * kd, h, w))
    kernels = reshape(weight, (o, c_w * kd, kh, kw))
    out = conv2d(images, kernels, bias, strides[1:], tuple(plane), dilations[1:], groups)
    return transpose(reshape(out, (n, count, o, *out.shape[2:])), (0, 2, 1, 3, 4))


def conv_transpose3d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Value:
    """`conv_transpose2d` of x (N, C, D, H, W) and weight (C, O / groups, KD, KH, KW)."""
    name = "conv_transpose3d"
    x, weight = _with_axes(name, 3, x, weight)
    options = (("stride", stride), ("padding", padding), ("output_padding", output_padding), ("dilation", dilation))
    strides, pads, extra, dilations = (per_axis(name, option, value, 3) for option, value in options)
    check_output_padding(name, extra, strides)
    (s, *ss), (p, *ps), (e, *es), (d, *ds) = strides, pads, extra, dilations
    n, c, depth, h, w = x.shape
    _, o_w, kd, kh, kw = weight.shape
    length = (depth - 1) * s + d * (kd - 1) + e + 1
    if length - 2 * p < 1 or min(depth, kd) < 1:
        raise ShapeError(f"{name}: padding {padding} leaves nothing of the output depth {length}")
    images = reshape(transpose(x, (0, 2, 1, 3, 4)), (n * depth, c, h, w))
    taps = conv_transpose2d(images, reshape(weight, (c, o_w * kd, kh, kw)), None, ss, ps, es, groups, ds)
    o, (oh, ow) = o_w * groups, taps.shape[2:]
    taps = transpose(reshape(taps, (n, depth, o, kd, oh, ow)), (0, 2, 3, 1, 4, 5))
    total = None
    for tap in range(kd):
        plane = reshape(slice(taps, (0, 0, tap, 0, 0, 0), (n, o, tap + 1, depth, oh, ow)), (n, o, depth, oh, ow))
        low = tap * d
        high = length - low - (depth - 1) * s - 1
        part = bind(pad_p, plane, low=(0, 0, low, 0, 0), high=(0, 0, high, 0, 0), gaps=(0, 0, s - 1, 0, 0), value=0.0)
        total = part if total is None else add(total, part)
    out = slice(total, (0, 0, p, 0, 0), (n, o, length - p, oh, ow))
    if bias is None:
        return out
    offset = as_value(bias)
    if offset.shape != (o,):
        raise ShapeError(f"{name}: the bias has shape {offset.shape}, expected ({o},)")
    return add(out, reshape(offset, (-1, 1, 1, 1)))


def _with_axes(name: str, axes: int, x: ArrayLike, weight: ArrayLike) -> tuple[Value, Value]:
    a, b = promote(x, weight)
    if a.ndim != axes + 2 or b.ndim != axes + 2:
        raise ShapeError(f"{name}: found shapes {a.shape} and {b.shape}, expected {axes + 2} axes")
    return a, b


def _with_row(x: Value) -> Value:
    return reshape(x, (*x.shape[:2], 1, x.shape[2]))


def _without_row(x: Value) -> Value:
    return reshape(x, (*x.shape[:2], x.shape[3]))
