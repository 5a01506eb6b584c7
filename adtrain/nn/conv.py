"""Convolution layers; a sample is an image (channels, height, width)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.nn import fields
from adtrain.nn.fields import IMAGE_AXES, pair, size_text
from adtrain.nn.init import WHITENING, ConvInit, WeightInit, WeightLayer, whitening
from adtrain.nn.module import Mode, Params, Shape, State
from adtrain.option_types import Count, CountPair, NonNegative, Padding, Size, SizePair

INFERRED = ("in_channels", int, "in_channels is inferred from the input")


@dataclass(frozen=True)
class Conv2d(WeightLayer):
    """Cross-correlation, as torch.nn.Conv2d; weight (out_channels, in_channels / groups, kernel size).

    `padding="same"` keeps height and width and needs stride 1. If the total padding of an axis is odd, the extra row
    is at the bottom, or the extra column on the right.

    `weight_init="whitening"` is for the first layer: filters whose outputs for patches of the training images have
    variance 1 and no correlation, and their negatives. It allows twice as many filters as a patch has numbers.
    """

    left_out = INFERRED
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
        _check_groups(self)
        if self.padding == "same" and pair(self.stride) != (1, 1):
            raise OptionError(f"conv2d: padding 'same' needs stride 1, found stride {self.stride}")
        if self.weight_init == WHITENING and self.groups != 1:
            raise OptionError(f"conv2d: weight_init whitening needs groups 1, found groups {self.groups}")

    def output_shape(self, shape: Shape) -> Shape:
        _check_channels(self, shape)
        kernel = _dilated(self)
        if self.weight_init == WHITENING:
            _check_whitening(self, shape, kernel)
        low, extra = self.paddings()
        padded = tuple(n + 2 * p + e for n, p, e in zip(shape[1:], low, extra, strict=True))
        if any(k > n for k, n in zip(kernel, padded, strict=True)):
            dilated = f" (dilated {size_text(kernel)})" if kernel != pair(self.kernel_size) else ""
            raise ShapeError(
                f"conv2d: kernel {size_text(pair(self.kernel_size))}{dilated} is larger than the padded input "
                f"{size_text(padded)}"
            )
        sizes = zip(padded, kernel, pair(self.stride), strict=True)
        return (self.out_channels, *((n - k) // s + 1 for n, k, s in sizes))

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        weight = (self.out_channels, shape[0] // self.groups, *pair(self.kernel_size))
        return {"weight": weight, "bias": (self.out_channels,)} if self.bias else {"weight": weight}

    def needs_images(self, shape: Shape) -> bool:
        return self.weight_init == WHITENING

    def input_weights(self, shape: Shape, images: np.ndarray) -> Params:
        if self.weight_init != WHITENING:
            return {}
        filters = whitening(self.out_channels, pair(self.kernel_size), pair(self.dilation), images)
        return {"weight": filters * self.init_gain}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        padding, extra = self.paddings()
        if any(extra):
            x = ops.pad(x, ((0, 0), (0, 0), (0, extra[0]), (0, extra[1])))
        y = ops.conv2d(
            x,
            params["weight"],
            params.get("bias"),
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return y, state

    def paddings(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(height, width) padding at both ends, and the extra padding at the bottom and on the right."""
        if self.padding != "same":
            return pair(self.padding), (0, 0)
        high, wide = (k - 1 for k in _dilated(self))
        return (high // 2, wide // 2), (high % 2, wide % 2)


@dataclass(frozen=True)
class Conv1d(WeightLayer):
    """Cross-correlation of (channels, length), as torch.nn.Conv1d; weight (out_channels, in_channels / groups, kernel).

    `padding="same"` keeps the length and needs stride 1.
    """

    left_out = INFERRED
    out_channels: Size
    _: KW_ONLY
    kernel_size: Size
    stride: Size = 1
    padding: Count | Literal["same"] = 0
    dilation: Size = 1
    groups: Size = 1
    bias: bool = True
    in_channels: Size | None = None
    weight_init: WeightInit = "kaiming_uniform"
    init_gain: NonNegative = 1.0

    def __post_init__(self) -> None:
        _check_groups(self)
        if self.padding == "same" and self.stride != 1:
            raise OptionError(f"conv1d: padding 'same' needs stride 1, found stride {self.stride}")

    def output_shape(self, shape: Shape) -> Shape:
        _check_channels(self, shape, ("channels", "length"))
        if self.padding == "same":
            return (self.out_channels, shape[1])
        kernel, padded = self.dilation * (self.kernel_size - 1) + 1, shape[1] + 2 * self.padding
        if kernel > padded:
            raise ShapeError(f"conv1d: kernel {kernel} is larger than the padded input {padded}")
        return (self.out_channels, (padded - kernel) // self.stride + 1)

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        weight = (self.out_channels, shape[0] // self.groups, self.kernel_size)
        return {"weight": weight, "bias": (self.out_channels,)} if self.bias else {"weight": weight}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        options = self.stride, self.padding, self.dilation, self.groups
        return ops.conv1d(x, params["weight"], params.get("bias"), *options), state


@dataclass(frozen=True)
class ConvTranspose2d(WeightLayer):
    """The transpose of Conv2d, as torch.nn.ConvTranspose2d; weight (in_channels, out_channels / groups, kernel)."""

    left_out = INFERRED
    out_channels: Size
    _: KW_ONLY
    kernel_size: SizePair
    stride: SizePair = 1
    padding: CountPair = 0
    output_padding: CountPair = 0
    groups: Size = 1
    bias: bool = True
    dilation: SizePair = 1
    in_channels: Size | None = None
    weight_init: WeightInit = "kaiming_uniform"
    init_gain: NonNegative = 1.0

    def __post_init__(self) -> None:
        _check_groups(self)
        if any(extra >= s for extra, s in zip(pair(self.output_padding), pair(self.stride), strict=True)):
            raise OptionError(
                f"conv_transpose2d: output_padding is {self.output_padding}, expected less than stride, {self.stride}"
            )

    def output_shape(self, shape: Shape) -> Shape:
        _check_channels(self, shape)
        sizes = zip(
            shape[1:], pair(self.stride), pair(self.padding), _dilated(self), pair(self.output_padding), strict=True
        )
        output = tuple((n - 1) * s - 2 * p + k + extra for n, s, p, k, extra in sizes)
        if any(n < 1 for n in output):
            raise ShapeError(
                f"conv_transpose2d: padding {size_text(pair(self.padding))} makes the output empty: "
                f"{size_text(output)} for the input {size_text(shape[1:])}"
            )
        return (self.out_channels, *output)

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        weight = (shape[0], self.out_channels // self.groups, *pair(self.kernel_size))
        return {"weight": weight, "bias": (self.out_channels,)} if self.bias else {"weight": weight}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        y = ops.conv_transpose2d(
            x,
            params["weight"],
            params.get("bias"),
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            groups=self.groups,
            dilation=self.dilation,
        )
        return y, state


def _dilated(layer: Conv2d | ConvTranspose2d) -> tuple[int, int]:
    """Height and width of the dilated kernel."""
    (kh, kw), (dh, dw) = pair(layer.kernel_size), pair(layer.dilation)
    return dh * (kh - 1) + 1, dw * (kw - 1) + 1


def _check_whitening(layer: Conv2d, shape: Shape, kernel: tuple[int, int]) -> None:
    numbers = shape[0] * prod(pair(layer.kernel_size))
    if layer.out_channels > 2 * numbers:
        each = f"2 for each of the {numbers} numbers of a patch"
        raise ShapeError(
            f"conv2d: out_channels is {layer.out_channels}, expected at most {2 * numbers} with whitening: {each}"
        )
    if any(k > n for k, n in zip(kernel, shape[1:], strict=True)):
        reason = f"the kernel {size_text(kernel)} is larger than the input {size_text(shape[1:])}"
        raise ShapeError(f"conv2d: weight_init whitening needs patches without padding, but {reason}")


def _check_groups(layer: Conv1d | Conv2d | ConvTranspose2d) -> None:
    if layer.out_channels % layer.groups:
        raise OptionError(
            f"{layer.kind()}: out_channels {layer.out_channels} is not a multiple of groups {layer.groups}"
        )


def _check_channels(layer: Conv1d | Conv2d | ConvTranspose2d, shape: Shape, axes: tuple[str, ...] = IMAGE_AXES) -> None:
    fields.check_ndim(layer, shape, axes)
    fields.check_inferred(layer, "in_channels", shape[0], shape)
    if shape[0] % layer.groups:
        raise ShapeError(
            f"{layer.kind()}: the input's {shape[0]} channels are not a multiple of groups {layer.groups}: {shape}"
        )
