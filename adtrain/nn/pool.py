"""Pooling and upsampling; a sample is an image (channels, height, width)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import OptionError, ShapeError
from adtrain.nn import fields
from adtrain.nn.fields import IMAGE_AXES, pair, size_text
from adtrain.nn.module import Mode, Module, Params, Shape, State
from adtrain.option_types import CountPair, SizePair


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
        fields.check_ndim(self, shape, IMAGE_AXES)
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
class AdaptiveAvgPool2d(Module):
    """Means over a grid of output_size windows for an input of any size, as torch.nn.AdaptiveAvgPool2d."""

    output_size: SizePair

    def output_shape(self, shape: Shape) -> Shape:
        fields.check_ndim(self, shape, IMAGE_AXES)
        return (shape[0], *pair(self.output_size))

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.adaptive_avg_pool2d(x, self.output_size), state


@dataclass(frozen=True)
class AdaptiveMaxPool2d(Module):
    """Maxima over a grid of output_size windows of equal size; 1 is the maximum of each channel."""

    output_size: SizePair

    def output_shape(self, shape: Shape) -> Shape:
        fields.check_ndim(self, shape, IMAGE_AXES)
        size = pair(self.output_size)
        if any(n % count for n, count in zip(shape[1:], size, strict=True)):
            given = size_text(shape[1:])
            raise ShapeError(
                f"adaptive_max_pool2d: the output size {size_text(size)} does not divide the input {given}"
            )
        return (shape[0], *size)

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
        fields.check_ndim(self, shape, IMAGE_AXES)
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
