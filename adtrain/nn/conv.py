"""Layers of images (channels, height, width): convolutions, pooling and upsampling."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import ClassVar, Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import OptionError, ShapeError
from adtrain.nn.init import WHITENING, ConvInit, WeightInit, WeightLayer, whitening
from adtrain.nn.module import (
    IMAGE_AXES,
    Mode,
    Module,
    Params,
    Shape,
    State,
    check_inferred,
    check_ndim,
    pair,
    size_text,
)
from adtrain.ops.conv import check_output_padding
from adtrain.option_types import Count, CountPair, NonNegative, Padding, Size, SizePair


@dataclass(frozen=True)
class _Convolution(WeightLayer):
    """The operation of the same name in `ops`, of images or, with other `_axes`, of sequences."""

    _axes: ClassVar[tuple[str, ...]] = IMAGE_AXES
    left_out = ("in_channels", int, "in_channels is inferred from the input")
    out_channels: Size
    _: KW_ONLY
    kernel_size: SizePair
    stride: SizePair = 1
    padding: Padding = 0
    dilation: SizePair = 1
    groups: Size = 1
    bias: bool = True
    in_channels: Size | None = None
    weight_init: ConvInit = "kaiming_uniform"
    init_gain: NonNegative = 1.0

    def __post_init__(self) -> None:
        if self.out_channels % self.groups:
            raise OptionError(
                f"{self.kind()}: out_channels {self.out_channels} is not a multiple of groups {self.groups}"
            )
        if self.padding == "same" and pair(self.stride) != (1, 1):
            raise OptionError(f"{self.kind()}: padding 'same' needs stride 1, found stride {self.stride}")

    def _sizes(self, value: int | tuple[int, ...]) -> tuple[int, ...]:
        """An option for each axis of the kernel."""
        return value if isinstance(value, tuple) else (value,) * (len(self._axes) - 1)

    @property
    def _dilated(self) -> tuple[int, ...]:
        """The sizes of the dilated kernel."""
        pairs = zip(self._sizes(self.kernel_size), self._sizes(self.dilation), strict=True)
        return tuple(d * (k - 1) + 1 for k, d in pairs)

    def _check_input(self, shape: Shape) -> None:
        check_ndim(self, shape, self._axes)
        check_inferred(self, "in_channels", shape[0], shape)
        if shape[0] % self.groups:
            raise ShapeError(
                f"{self.kind()}: the input's {shape[0]} channels are not a multiple of groups {self.groups}: {shape}"
            )

    def output_shape(self, shape: Shape) -> Shape:
        self._check_input(shape)
        if self.padding == "same":
            return (self.out_channels, *shape[1:])
        size, kernel = self._sizes(self.kernel_size), self._dilated
        padded = tuple(n + 2 * p for n, p in zip(shape[1:], self._sizes(self.padding), strict=True))
        if any(k > n for k, n in zip(kernel, padded, strict=True)):
            dilated = f" (dilated {size_text(kernel)})" if kernel != size else ""
            reason = f"kernel {size_text(size)}{dilated} is larger than the padded input {size_text(padded)}"
            raise ShapeError(f"{self.kind()}: {reason}")
        strides = zip(padded, kernel, self._sizes(self.stride), strict=True)
        return (self.out_channels, *((n - k) // s + 1 for n, k, s in strides))

    def _weight_shape(self, channels: int) -> Shape:
        """The shape of the weight for an input of `channels` channels."""
        return (self.out_channels, channels // self.groups, *self._sizes(self.kernel_size))

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        weight = {"weight": self._weight_shape(shape[0])}
        return {**weight, "bias": (self.out_channels,)} if self.bias else weight

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        options = self.stride, self.padding, self.dilation, self.groups
        return getattr(ops, self.kind())(x, params["weight"], params.get("bias"), *options), state


@dataclass(frozen=True)
class Conv2d(_Convolution):
    """Cross-correlation, as torch.nn.Conv2d; weight (out_channels, in_channels / groups, kernel size).

    `padding="same"` keeps height and width and needs stride 1. If the total padding of an axis is odd, the extra row
    is at the bottom, or the extra column on the right.

    `weight_init="whitening"` is for the first layer: filters whose outputs for patches of the training images have
    variance 1 and no correlation, and their negatives. It allows twice as many filters as a patch has numbers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_init == WHITENING and self.groups != 1:
            raise OptionError(f"conv2d: weight_init whitening needs groups 1, found groups {self.groups}")

    def _check_input(self, shape: Shape) -> None:
        super()._check_input(shape)
        if self.weight_init == WHITENING:
            numbers = shape[0] * prod(pair(self.kernel_size))
            if self.out_channels > 2 * numbers:
                expected = (
                    f"expected at most {2 * numbers} with whitening: 2 for each of the {numbers} numbers of a patch"
                )
                raise ShapeError(f"conv2d: out_channels is {self.out_channels}, {expected}")
            if any(k > n for k, n in zip(self._dilated, shape[1:], strict=True)):
                reason = f"the kernel {size_text(self._dilated)} is larger than the input {size_text(shape[1:])}"
                raise ShapeError(f"conv2d: weight_init whitening needs patches without padding, but {reason}")

    def needs_images(self, shape: Shape) -> bool:
        return self.weight_init == WHITENING

    def input_weights(self, shape: Shape, images: np.ndarray) -> Params:
        if self.weight_init != WHITENING:
            return {}
        filters = whitening(self.out_channels, pair(self.kernel_size), pair(self.dilation), images)
        return {"weight": filters * self.init_gain}


@dataclass(frozen=True)
class Conv1d(_Convolution):
    """Cross-correlation of (channels, length), as torch.nn.Conv1d; weight (out_channels, in_channels / groups, kernel).

    `padding="same"` keeps the length and needs stride 1.
    """

    _axes = ("channels", "length")
    _: KW_ONLY
    kernel_size: Size
    stride: Size = 1
    padding: Count | Literal["same"] = 0
    dilation: Size = 1
    weight_init: WeightInit = "kaiming_uniform"


@dataclass(frozen=True)
class ConvTranspose2d(_Convolution):
    """The transpose of Conv2d, as torch.nn.ConvTranspose2d; weight (in_channels, out_channels / groups, kernel)."""

    _: KW_ONLY
    padding: CountPair = 0
    weight_init: WeightInit = "kaiming_uniform"
    output_padding: CountPair = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output_padding("conv_transpose2d", *map(pair, (self.output_padding, self.stride, self.dilation)))

    def output_shape(self, shape: Shape) -> Shape:
        self._check_input(shape)
        options = pair(self.stride), pair(self.padding), self._dilated, pair(self.output_padding)
        sizes = zip(shape[1:], *options, strict=True)
        output = tuple((n - 1) * s - 2 * p + k + extra for n, s, p, k, extra in sizes)
        if any(n < 1 for n in output):
            raise ShapeError(
                f"conv_transpose2d: padding {size_text(pair(self.padding))} makes the output empty: "
                f"{size_text(output)} for the input {size_text(shape[1:])}"
            )
        return (self.out_channels, *output)

    def _weight_shape(self, channels: int) -> Shape:
        return (channels, self.out_channels // self.groups, *pair(self.kernel_size))

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        options = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return ops.conv_transpose2d(x, params["weight"], params.get("bias"), *options), state


@dataclass(frozen=True)
class _Pool2d(Module):
    """The operation of the same name in `ops`."""

    kernel_size: SizePair
    _: KW_ONLY
    stride: SizePair | None = None
    padding: CountPair = 0

    def __post_init__(self) -> None:
        if any(2 * p > k for p, k in zip(pair(self.padding), pair(self.kernel_size), strict=True)):
            raise OptionError(
                f"{self.kind()}: padding {self.padding} is more than half of kernel_size {self.kernel_size}"
            )

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, IMAGE_AXES)
        kernel = pair(self.kernel_size)
        stride = kernel if self.stride is None else pair(self.stride)
        padded = tuple(n + 2 * p for n, p in zip(shape[1:], pair(self.padding), strict=True))
        if any(k > n for k, n in zip(kernel, padded, strict=True)):
            raise ShapeError(
                f"{self.kind()}: kernel {size_text(kernel)} is larger than the padded input {size_text(padded)}"
            )
        return (shape[0], *((n - k) // s + 1 for n, k, s in zip(padded, kernel, stride, strict=True)))

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return getattr(ops, self.kind())(x, self.kernel_size, stride=self.stride, padding=self.padding), state


@dataclass(frozen=True)
class MaxPool2d(_Pool2d):
    """The maximum of each window; stride is kernel_size by default; a partial window at the end is dropped."""


@dataclass(frozen=True)
class AvgPool2d(_Pool2d):
    """The mean of each window, padding included; stride is kernel_size by default; a partial window is dropped."""


@dataclass(frozen=True)
class _AdaptivePool2d(Module):
    output_size: SizePair

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, IMAGE_AXES)
        return (shape[0], *pair(self.output_size))


@dataclass(frozen=True)
class AdaptiveAvgPool2d(_AdaptivePool2d):
    """Means over a grid of output_size windows for an input of any size, as torch.nn.AdaptiveAvgPool2d."""

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.adaptive_avg_pool2d(x, self.output_size), state


@dataclass(frozen=True)
class AdaptiveMaxPool2d(_AdaptivePool2d):
    """Maxima over a grid of output_size windows of equal size; 1 is the maximum of each channel."""

    def output_shape(self, shape: Shape) -> Shape:
        found = super().output_shape(shape)
        if any(n % count for n, count in zip(shape[1:], found[1:], strict=True)):
            size, given = size_text(found[1:]), size_text(shape[1:])
            raise ShapeError(f"adaptive_max_pool2d: the output size {size} does not divide the input {given}")
        return found

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        rows, columns = pair(self.output_size)
        return ops.max_pool2d(x, (x.shape[2] // rows, x.shape[3] // columns)), state


@dataclass(frozen=True)
class Upsample(Module):
    """Images `scale_factor` times as high and wide, by copies of pixels or by bilinear interpolation.

    Pixels are squares whose outer borders are those of the image, as in torch.nn.Upsample with align_corners=False.
    """

    scale_factor: SizePair
    _: KW_ONLY
    mode: Literal["nearest", "bilinear"] = "nearest"

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, IMAGE_AXES)
        for n, factor in zip(shape[1:], pair(self.scale_factor), strict=True):
            if n * n * factor >= 2**31:
                raise ShapeError(f"upsample: {n} pixels times {factor} need weights of 2^31 numbers or more")
        return (shape[0], *(n * factor for n, factor in zip(shape[1:], pair(self.scale_factor), strict=True)))

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        (n, channels, height, width), (rows, columns) = x.shape, pair(self.scale_factor)
        if self.mode == "nearest":
            spread = ops.reshape(x, (n, channels, height, 1, width, 1))
            spread = ops.broadcast_to(spread, (n, channels, height, rows, width, columns))
            return ops.reshape(spread, (n, channels, height * rows, width * columns)), state
        left, right = (
            array(_interpolation(length, factor).astype(x.dtype), device=x.device)
            for length, factor in ((height, rows), (width, columns))
        )
        with ops.matmul_precision("full"):
            return ops.matmul(left, ops.matmul(x, right, transpose_b=True)), state


def _interpolation(length: int, factor: int) -> np.ndarray:
    """The weights (length factor, length) of linear interpolation between the centres of pixels."""
    places = np.clip((np.arange(length * factor) + 0.5) / factor - 0.5, 0, length - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(length)))
