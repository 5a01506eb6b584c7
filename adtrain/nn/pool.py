"""Pooling layers; a sample is an image (channels, height, width)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.nn import fields
from adtrain.nn.conv import IMAGE_AXES
from adtrain.nn.fields import pair, size_text
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
