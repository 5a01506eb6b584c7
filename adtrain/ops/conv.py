"""Convolution over one, two and three axes. The primitives, conv2d and its gradients, differentiate into one another.

With y = x * w (x: NCHW, w: OIHW) each is the gradient, by one factor, of the same trilinear form: the sum of
``y[n, o] x[n, c] w[o, c]`` over all windows. So a vjp of one is another of the three. The fourth primitive is the
weight gradient of each image.
(V. Dumoulin, F. Visin: "A guide to convolution arithmetic for deep learning", 2016.)

References in NumPy: the windows of an image as columns of a matrix (im2col), then BLAS. Images are processed in batches
whose columns stay in the cache.
(K. Chellapilla, S. Puri, P. Simard: "High performance convolutional neural networks for document processing", 2006.)

Batching rules: if members share the weights, their images become one batch. If they share the images, their filters
become output channels of one convolution. Otherwise members are groups of channels: an image is (members x channels, H,
W).

A signal of one axis is an image of one row. For three axes, each output plane is a convolution of one image, whose
channels are all input planes that the kernel covers. A transposed convolution computes the planes of each filter tap
and adds them at their positions in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.batching_rules import all_mapped, fold, move_axes, unfold
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import check_option
from adtrain.core.precision import FULL, precision_of, rounded
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.common import ArrayLike, as_value, promote, require_float, reshape
from adtrain.ops.elementwise import add
from adtrain.ops.index import take
from adtrain.ops.shape import pad_p, slice, transpose
from adtrain.ops.windows import LIMIT, Ints, Padding, Pairs, pad_image, paddings, per_axis
from adtrain.option_types import Size

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]


class Window(NamedTuple):
    """How a kernel moves over an image: pairs (rows, columns), and the number of groups."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def output_length(self, axis: int, length: int, kernel: int) -> int:
        """Positions of the kernel along one axis; 0 or less where it does not fit."""
        span = self.dilation[axis] * (kernel - 1) + 1
        return (length + 2 * self.padding[axis] - span) // self.stride[axis] + 1


COLUMN_BYTES = 1 << 20
"""Maximum bytes of the columns of a batch of several images: about the size of an L2 cache."""


def _padded(x: np.ndarray, padding: tuple[int, int]) -> np.ndarray:
    if padding == (0, 0):
        return np.ascontiguousarray(x)
    ph, pw = padding
    return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))


def _batches(count: int, columns_each: int, dtype: np.dtype) -> Iterator[Any]:
    """Slices of ``count`` images such that the columns of a slice fit into COLUMN_BYTES."""
    size = max(1, COLUMN_BYTES // max(1, columns_each * dtype.itemsize))
    return (np.s_[start : start + size] for start in range(0, count, size))


def _columns(images: np.ndarray, kernel: tuple[int, int], out: tuple[int, int], window: Window) -> np.ndarray:
    """The im2col matrix (N, G, C / G * KH * KW, OH * OW) of padded, contiguous images (N, C, H, W)."""
    (sn, sc, sh, sw), (dh, dw), (th, tw) = images.strides, window.dilation, window.stride
    n, channels = images.shape[:2]
    taps = np.lib.stride_tricks.as_strided(
        images, (n, channels, *kernel, *out), (sn, sc, sh * dh, sw * dw, sh * th, sw * tw)
    )
    return taps.reshape(n, window.groups, channels // window.groups * kernel[0] * kernel[1], out[0] * out[1])


def conv2d_reference(x: np.ndarray, w: np.ndarray, window: Window, precision: str) -> np.ndarray:
    """(N, C, H, W) and (O, C / groups, KH, KW) to (N, O, OH, OW)."""
    x, w = rounded(x, precision), rounded(w, precision)
    groups, kernel = window.groups, w.shape[2:]
    oh, ow = (window.output_length(i, x.shape[i + 2], kernel[i]) for i in (0, 1))
    xp = _padded(x, window.padding)
    rows = w.reshape(groups, w.shape[0] // groups, -1)
    out = np.empty((len(x), groups, rows.shape[1], oh * ow), x.dtype)
    for batch in _batches(len(x), groups * rows.shape[2] * oh * ow, x.dtype):
        np.matmul(rows, _columns(xp[batch], kernel, (oh, ow), window), out=out[batch])
    return out.reshape(len(x), w.shape[0], oh, ow)


def weight_grad_reference(
    x: np.ndarray, g: np.ndarray, window: Window, size: tuple[int, int], precision: str
) -> np.ndarray:
    """Images (N, C, H, W) and cotangents (N, O, OH, OW) to (O, C / groups, *size)."""
    x, g = rounded(x, precision), rounded(g, precision)
    groups, (n, o, oh, ow) = window.groups, g.shape
    xp = _padded(x, window.padding)
    ct = np.ascontiguousarray(g).reshape(n, groups, o // groups, oh * ow)
    length = x.shape[1] // groups * size[0] * size[1]
    total = np.zeros((groups, o // groups, length), x.dtype)
    for batch in _batches(n, groups * length * oh * ow, x.dtype):
        total += np.matmul(ct[batch], _columns(xp[batch], size, (oh, ow), window).swapaxes(-1, -2)).sum(axis=0)
    return total.reshape(o, x.shape[1] // groups, *size)


def weight_grad_by_image_reference(
    x: np.ndarray, g: np.ndarray, window: Window, size: tuple[int, int], precision: str
) -> np.ndarray:
    """Images (N, C, H, W) and cotangents (N, O, OH, OW) to (N, O, C / groups, *size)."""
    one = [weight_grad_reference(x[i : i + 1], g[i : i + 1], window, size, precision) for i in range(len(x))]
    return np.stack(one) if one else np.zeros((0, g.shape[1], x.shape[1] // window.groups, *size), x.dtype)


def input_grad_reference(
    g: np.ndarray, w: np.ndarray, window: Window, size: tuple[int, int], precision: str
) -> np.ndarray:
    """Cotangents (N, O, OH, OW) and weights (O, C / groups, KH, KW) to (N, C, *size).

    Inside, the images are the last axis: so a batch is one matrix product, and the sums of a tap are over contiguous
    numbers even if rows are short.
    """
    g, w = rounded(g, precision), rounded(w, precision)
    groups, (kh, kw), (n, o, oh, ow) = window.groups, w.shape[2:], g.shape
    (ph, pw), (dh, dw), (sh, sw) = window.padding, window.dilation, window.stride
    channels = w.shape[1] * groups
    ct = g.reshape(n, groups, o // groups, oh * ow)
    rows = w.reshape(groups, o // groups, -1).swapaxes(1, 2)
    out = np.empty((n, channels, *size), g.dtype)
    for batch in _batches(n, channels * kh * kw * oh * ow, g.dtype):
        last = np.ascontiguousarray(np.moveaxis(ct[batch], 0, -1))
        columns = np.matmul(rows, last.reshape(groups, o // groups, -1)).reshape(channels, kh, kw, oh, ow, -1)
        padded = np.zeros((channels, size[0] + 2 * ph, size[1] + 2 * pw, last.shape[-1]), g.dtype)
        for i in range(kh):
            for j in range(kw):
                rows_at = np.s_[i * dh : i * dh + sh * (oh - 1) + 1 : sh]
                columns_at = np.s_[j * dw : j * dw + sw * (ow - 1) + 1 : sw]
                padded[:, rows_at, columns_at] += columns[:, i, j]
        out[batch] = np.moveaxis(padded[:, ph : ph + size[0], pw : pw + size[1]], -1, 0)
    return out


Op = Callable[..., Value]


def conv2d_batch(op: Op, mapped: Sequence[bool], x: Value, w: Value, window: Window, **params: Any) -> Value:
    if not mapped[1]:
        return unfold(op(fold(x), w, window=window, **params), x.shape[0])
    members = w.shape[0]
    if not mapped[0] and window.groups == 1:
        out = op(x, fold(w), window=window, **params)
    else:
        x, w = all_mapped(mapped, (x, w))
        out = op(_as_channels(x), fold(w), window=_grouped(window, members), **params)
    return _from_channels(out, members)


def input_grad_batch(op: Op, mapped: Sequence[bool], g: Value, w: Value, window: Window, **params: Any) -> Value:
    if not mapped[1]:
        return unfold(op(fold(g), w, window=window, **params), g.shape[0])
    g, w = all_mapped(mapped, (g, w))
    members = w.shape[0]
    return _from_channels(op(_as_channels(g), fold(w), window=_grouped(window, members), **params), members)


def weight_grad_batch(
    op: Op, mapped: Sequence[bool], x: Value, g: Value, window: Window, by_image: Op, **params: Any
) -> Value:
    """`by_image` computes the weight gradient of each image, for members of one image."""
    if not mapped[0] and window.groups == 1:
        return unfold(op(x, _as_channels(g), window=window, **params), g.shape[0])
    x, g = all_mapped(mapped, (x, g))
    members = x.shape[0]
    if x.shape[1] == 1:
        return by_image(fold(x), fold(g), window=window, **params)
    return unfold(op(_as_channels(x), _as_channels(g), window=_grouped(window, members), **params), members)


def _grouped(window: Window, members: int) -> Window:
    return window._replace(groups=window.groups * members)


def _as_channels(x: Value) -> Value:
    """(members, N, C, H, W) to (N, members x C, H, W)."""
    members, n, c, *image = x.shape
    return reshape(move_axes(x, 0, 1), (n, members * c, *image))


def _from_channels(x: Value, members: int) -> Value:
    """(N, members x C, H, W) to (members, N, C, H, W)."""
    n, channels, *image = x.shape
    return move_axes(reshape(x, (n, members, channels // members, *image)), 1, 0)


def _conv_shape(x: Any, w: Any, window: Window, precision: str = FULL) -> ArrayType:
    require_float("conv2d", x, w)
    _check_ranks("conv2d", x, w)
    (n, c, *image), (o, c_w, *kernel) = x.shape, w.shape
    groups = window.groups
    if c != c_w * groups:
        raise ShapeError(
            f"conv2d: the input has {c} channels, the weight {w.shape} takes {c_w} x {groups} groups = {c_w * groups}"
        )
    if o % groups:
        raise ShapeError(f"conv2d: {o} output channels do not divide into {groups} groups")
    if min(c, *kernel) < 1:
        raise ShapeError(f"conv2d: found {c} channels and kernel {kernel[0]}x{kernel[1]}, expected at least 1 of each")
    out = [window.output_length(i, image[i], kernel[i]) for i in (0, 1)]
    if min(out) < 1:
        raise ShapeError(
            f"conv2d: kernel {kernel[0]}x{kernel[1]} (dilation {window.dilation}) is larger than the input "
            f"{image[0]}x{image[1]} with padding {window.padding}"
        )
    return ArrayType((n, o, *out), x.dtype)


def _check_ranks(name: str, *xs: Any) -> None:
    for x in xs:
        if len(x.shape) != 4 or x.dtype != xs[0].dtype:
            raise ShapeError(f"{name}: found {' and '.join(f'{x.dtype}{list(x.shape)}' for x in xs)}, expected 4 axes")


def _input_grad_shape(g: Any, w: Any, window: Window, size: tuple[int, int], precision: str = FULL) -> ArrayType:
    _check_ranks("conv2d_input_grad", g, w)
    x = ArrayType((g.shape[0], w.shape[1] * window.groups, *size), g.dtype)
    if _conv_shape(x, w, window).shape != g.shape:
        raise ShapeError(f"conv2d_input_grad: found {g.shape}, weight {w.shape}, input size {size}: they do not fit")
    return x


def _weight_grad_shape(x: Any, g: Any, window: Window, size: tuple[int, int], precision: str = FULL) -> ArrayType:
    _check_ranks("conv2d_weight_grad", x, g)
    w = ArrayType((g.shape[1], x.shape[1] // window.groups, *size), x.dtype)
    if _conv_shape(x, w, window).shape != g.shape:
        raise ShapeError(f"conv2d_weight_grad: found {x.shape}, {g.shape}, kernel size {size}: they do not fit")
    return w


def _weight_grad_by_image_shape(
    x: Any, g: Any, window: Window, size: tuple[int, int], precision: str = FULL
) -> ArrayType:
    one = _weight_grad_shape(x, g, window, size)
    return ArrayType((x.shape[0], *one.shape), one.dtype)


def _flops(g_shape: Sequence[int], w_shape: Sequence[int]) -> int:
    (n, o, rows, columns), (_, c, *kernel) = g_shape, w_shape
    return 2 * n * o * rows * columns * c * kernel[0] * kernel[1]


def of_groups(window: Window, one: str, several: str) -> str:
    """How axes are related in a convolution of one group of channels, or of several."""
    return one if window.groups == 1 else several


conv2d_p: Primitive = Primitive(
    "conv2d",
    _conv_shape,
    conv2d_reference,
    [
        lambda out, x, w, window, precision: partial(
            _input_grad, w=w, window=window, size=x.shape[2:], precision=precision
        ),
        lambda out, x, w, window, precision: partial(
            _weight_grad, x, window=window, size=w.shape[2:], precision=precision
        ),
    ],
    lambda x, w, window, precision: _flops(_conv_shape(x, w, window).shape, w.shape),
    traits=(Trait.CONVOLUTION, Trait.BILINEAR),
    batch=conv2d_batch,
    axes=lambda x, w, window, precision: of_groups(window, "nc..,oc..->no..", "n...,....->n..."),
)
input_grad_p: Primitive = Primitive(
    "conv2d_input_grad",
    _input_grad_shape,
    input_grad_reference,
    [
        lambda out, g, w, window, size, precision: lambda u: _forward(u, w, window, precision),
        lambda out, g, w, window, size, precision: partial(
            _weight_grad, g=g, window=window, size=w.shape[2:], precision=precision
        ),
    ],
    lambda g, w, window, size, precision: _flops(g.shape, w.shape),
    traits=(Trait.CONVOLUTION, Trait.BILINEAR),
    batch=input_grad_batch,
    axes=lambda g, w, window, **_: of_groups(window, "no..,oc..->nc..", "n...,....->n..."),
)
weight_grad_p: Primitive = Primitive(
    "conv2d_weight_grad",
    _weight_grad_shape,
    weight_grad_reference,
    [
        lambda out, x, g, window, size, precision: partial(
            _input_grad, g, window=window, size=x.shape[2:], precision=precision
        ),
        lambda out, x, g, window, size, precision: lambda u: _forward(x, u, window, precision),
    ],
    lambda x, g, window, size, precision: _flops(g.shape, _weight_grad_shape(x, g, window, size).shape),
    traits=(Trait.BILINEAR,),
    batch=partial(weight_grad_batch, by_image=lambda x, g, **params: bind(weight_grad_by_image_p, x, g, **params)),
    axes=lambda x, g, window, **_: of_groups(window, "nc..,no..->oc..", "n...,n...->...."),
)
weight_grad_by_image_p: Primitive = Primitive(
    "conv2d_weight_grad_by_image",
    _weight_grad_by_image_shape,
    weight_grad_by_image_reference,
    [
        lambda out, x, g, window, size, precision: (
            lambda u: fold(
                input_grad_batch(
                    _input_grad, (True, True), unfold(g, g.shape[0]), u, window, size=x.shape[2:], precision=precision
                )
            )
        ),
        lambda out, x, g, window, size, precision: (
            lambda u: fold(conv2d_batch(_forward, (True, True), unfold(x, x.shape[0]), u, window, precision=precision))
        ),
    ],
    lambda x, g, window, size, precision: _flops(g.shape, _weight_grad_shape(x, g, window, size).shape),
    traits=(Trait.BILINEAR,),
    axes=lambda x, g, window, **_: of_groups(window, "nc..,no..->noc..", "n...,n...->n...."),
)


def _forward(x: Value, w: Value, window: Window, precision: str) -> Value:
    return bind(conv2d_p, x, w, window=window, precision=precision)


def _input_grad(g: Value, w: Value, window: Window, size: tuple[int, ...], precision: str) -> Value:
    return bind(input_grad_p, g, w, window=window, size=size, precision=precision)


def _weight_grad(x: Value, g: Value, window: Window, size: tuple[int, ...], precision: str) -> Value:
    return bind(weight_grad_p, x, g, window=window, size=size, precision=precision)


def conv2d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Value:
    """Cross-correlation of images with kernels, as `torch.nn.functional.conv2d`; see `matmul_precision`.

    Args:
        x: (N, C, H, W).
        weight: (O, C / groups, KH, KW).
        bias: (O,), added to every position.
        padding: zeros around the image: an integer, an integer for each axis, a pair (before, after) for each axis,
            "valid" (no padding) or "same" (OH = H; only with stride 1).

    Returns:
        (N, O, OH, OW), OH = (H + 2 padding - dilation (KH - 1) - 1) // stride + 1, and OW likewise.

    Raises:
        ShapeError: channels and groups do not fit, or the kernel is larger than the padded image.
    """
    x, weight = promote(x, weight)
    _check_ranks("conv2d", x, weight)
    window = _window("conv2d", stride, 0, dilation, groups)
    pads = conv_paddings("conv2d", padding, x.shape[2:], weight.shape[2:], window.stride, window.dilation)
    ph, pw = (min(p) for p in pads)  # the kernels pad both sides equally
    x = pad_image(x, tuple((low - p, high - p) for (low, high), p in zip(pads, (ph, pw), strict=True)))
    window = window._replace(padding=(ph, pw))
    out = _forward(x, weight, window, precision_of(x.dtype))
    return out if bias is None else _add_bias(out, bias)


def conv_transpose2d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Value:
    """The transpose of `conv2d` as a map of images, as `torch.nn.functional.conv_transpose2d`.

    Args:
        x: (N, C, H, W).
        weight: (C, O / groups, KH, KW).
        bias: (O,).
        output_padding: rows and columns added to the output at one side, fewer than the stride or the dilation.

    Returns:
        (N, O, OH, OW), OH = (H - 1) stride - 2 padding + dilation (KH - 1) + output_padding + 1, and OW likewise.
    """
    x, weight = promote(x, weight)
    _check_ranks("conv_transpose2d", x, weight)
    window = _window("conv_transpose2d", stride, padding, dilation, groups)
    extra = per_axis("conv_transpose2d", "output_padding", output_padding, 2)
    check_output_padding("conv_transpose2d", extra, window.stride, window.dilation)
    if x.shape[1] != weight.shape[0]:
        raise ShapeError(f"conv_transpose2d: the input has {x.shape[1]} channels, the weight takes {weight.shape[0]}")
    size = tuple(
        (x.shape[i + 2] - 1) * window.stride[i]
        - 2 * window.padding[i]
        + window.dilation[i] * (weight.shape[i + 2] - 1)
        + extra[i]
        + 1
        for i in (0, 1)
    )
    if min(size) < 1:
        raise ShapeError(f"conv_transpose2d: padding {window.padding} leaves nothing of the output: {size}")
    uncropped = tuple(n + 2 * p for n, p in zip(size, window.padding, strict=True))
    if prod(uncropped) >= LIMIT:
        raise ShapeError(f"conv_transpose2d: the output {uncropped}, with its padding, has 2^31 elements or more")
    out = _input_grad_of_size(x, weight, window, size, extra)
    return out if bias is None else _add_bias(out, bias)


def conv_paddings(
    name: str,
    padding: Padding,
    lengths: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Pairs:
    """`paddings` of a convolution. "same" needs stride 1, as in PyTorch."""
    if padding == "same" and set(stride) != {1}:
        raise OptionError(f'{name}: padding "same" needs stride 1, found stride {tuple(stride)}')
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    return paddings(name, padding, lengths, spans, stride)


def check_output_padding(name: str, extra: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> None:
    """OptionError unless it is less than the stride or the dilation along each axis, as in PyTorch."""
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        expected = f"expected less than the stride {stride} or the dilation {dilation}"
        raise OptionError(f"{name}: output_padding is {extra}, {expected}")


def _input_grad_of_size(g: Value, w: Value, window: Window, size: tuple[int, ...], extra: tuple[int, ...]) -> Value:
    """The input gradient with `extra` rows and columns at the end, which may be as many as the stride or more.

    An input gradient adds fewer than its stride. For more, the padding is less at both ends, and the rows and columns
    that this adds at the beginning are cut off. If the padding is less than `extra`, zeros follow.
    """
    more = [n if n >= stride else 0 for n, stride in zip(extra, window.stride, strict=True)]
    cut = [min(pair) for pair in zip(more, window.padding, strict=True)]
    zeros = [n - c for n, c in zip(more, cut, strict=True)]
    row, column = (p - n for p, n in zip(window.padding, cut, strict=True))
    whole = tuple(n + c - z for n, c, z in zip(size, cut, zeros, strict=True))
    out = _input_grad(g, w, window._replace(padding=(row, column)), whole, precision_of(g.dtype))
    if any(cut):
        out = slice(out, (0, 0, *cut), out.shape)
    return pad_image(out, tuple((0, n) for n in zeros))


def _window(name: str, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Window:
    (sh, sw), (ph, pw), (dh, dw) = (
        per_axis(name, option, value, 2)
        for option, value in (("stride", stride), ("padding", padding), ("dilation", dilation))
    )
    check_option(name, "groups", groups, Size)
    return Window((sh, sw), (ph, pw), (dh, dw), groups)


def _add_bias(out: Value, bias: ArrayLike) -> Value:
    value = as_value(bias)
    if value.shape != out.shape[1:2]:
        raise ShapeError(f"conv2d: the bias has shape {value.shape}, expected ({out.shape[1]},)")
    return add(out, reshape(value, (-1, 1, 1)))


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
    check_output_padding("conv_transpose1d", (e,), (s,), (d,))
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
    check_output_padding(name, extra, strides, dilations)
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
