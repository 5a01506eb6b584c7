"""Convolution in two dimensions. The primitives, conv2d and its gradients, differentiate into one another.

With y = x * w (x: NCHW, w: OIHW) each is the gradient, by one factor, of the same trilinear form: the sum of
``y[n, o] x[n, c] w[o, c]`` over all windows. So a vjp of one is another of the three. The fourth primitive is the
weight gradient of each image.
(V. Dumoulin, F. Visin: "A guide to convolution arithmetic for deep learning", 2016.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from adtrain.core.array import Value
from adtrain.core.batching_rules import fold, unfold
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import check_option
from adtrain.core.precision import FULL, precision_of
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.broadcasting import promote, reshape
from adtrain.ops.common import ArrayLike, as_value, require_float
from adtrain.ops.conv_batching import conv2d_batch, input_grad_batch, weight_grad_batch
from adtrain.ops.conv_reference import (
    conv2d_reference,
    input_grad_reference,
    weight_grad_by_image_reference,
    weight_grad_reference,
)
from adtrain.ops.elementwise import add
from adtrain.ops.windows import LIMIT, Padding, Pairs, pad_image, paddings, per_axis
from adtrain.option_types import Size

IntPair = int | Sequence[int]


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
    stride: IntPair = 1,
    padding: Padding = 0,
    dilation: IntPair = 1,
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
    stride: IntPair = 1,
    padding: IntPair = 0,
    output_padding: IntPair = 0,
    groups: int = 1,
    dilation: IntPair = 1,
) -> Value:
    """The transpose of `conv2d` as a map of images, as `torch.nn.functional.conv_transpose2d`.

    Args:
        x: (N, C, H, W).
        weight: (C, O / groups, KH, KW).
        bias: (O,).
        output_padding: rows and columns added to the output at one side, fewer than the stride.

    Returns:
        (N, O, OH, OW), OH = (H - 1) stride - 2 padding + dilation (KH - 1) + output_padding + 1, and OW likewise.
    """
    x, weight = promote(x, weight)
    _check_ranks("conv_transpose2d", x, weight)
    window = _window("conv_transpose2d", stride, padding, dilation, groups)
    extra = per_axis("conv_transpose2d", "output_padding", output_padding, 2)
    check_output_padding("conv_transpose2d", extra, window.stride)
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
    out = _input_grad(x, weight, window, size, precision_of(x.dtype))
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


def check_output_padding(name: str, extra: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if any(e >= s for e, s in zip(extra, stride, strict=True)):
        raise OptionError(f"{name}: output_padding is {extra}, expected less than the stride {stride}")


def _window(name: str, stride: IntPair, padding: IntPair, dilation: IntPair, groups: int) -> Window:
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
