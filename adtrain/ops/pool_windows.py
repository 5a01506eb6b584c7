"""The windows of pooling along each axis of an image, for all options that PyTorch has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import shown
from adtrain.core.types import Shape
from adtrain.ops.windows import Ints, Padding, paddings, per_axis


class AxisWindows(NamedTuple):
    """The windows along one axis.

    Attributes:
        length: elements of the axis.
        kernel: elements of a window.
        low, high: padding before and after the axis.
        outputs: number of windows.
    """

    length: int
    kernel: int
    stride: int
    low: int
    high: int
    dilation: int
    outputs: int

    @property
    def supported(self) -> bool:
        """Whether the primitives support it: equal padding, no dilation, no partial window at the end."""
        fits = self.length + 2 * self.low - self.kernel
        return self.low == self.high and self.dilation == 1 and self.outputs == fits // self.stride + 1

    def positions(self) -> np.ndarray:
        """Positions in the axis, (outputs, kernel). Those in the padding are negative, or at least ``length``."""
        starts = self.stride * np.arange(self.outputs) - self.low
        return starts[:, None] + self.dilation * np.arange(self.kernel)

    def positions_in_image(self) -> np.ndarray:
        """`positions`, with each one in the padding replaced by the nearest one of its window in the image.

        The maximum of the window, its first maximum and its last NaN stay the same.
        """
        at = self.positions()
        valid = (at >= 0) & (at < self.length)
        first = valid.argmax(1)
        last = self.kernel - 1 - valid[:, ::-1].argmax(1)
        return np.take_along_axis(at, np.clip(np.arange(self.kernel), first[:, None], last[:, None]), 1)

    def divisors(self, count_include_pad: bool) -> np.ndarray:
        """Number of elements of each window, with or without the padding. Elements past the padding never count."""
        at = self.positions()
        low, high = (-self.low, self.length + self.high) if count_include_pad else (0, self.length)
        return ((at >= low) & (at < high)).sum(1)


def single_elements(length: int) -> AxisWindows:
    """Windows of one element each."""
    return AxisWindows(length, 1, 1, 0, 0, 1, length)


def axis_windows(
    name: str, shape: Shape, kernel: Ints, stride: Ints | None, padding: Padding, dilation: Ints, ceil: bool
) -> list[AxisWindows]:
    """The windows along each axis of an image.

    Args:
        shape: (N, C, L), (N, C, H, W) or (N, C, D, H, W).
        ceil: keep a partial window at the end.

    Raises:
        OptionError: an option is out of its range, or the padding is more than half of the window.
        ShapeError: a window is larger than the padded image.
    """
    lengths, axes = shape[2:], len(shape) - 2
    kernels = per_axis(name, "kernel_size", kernel, axes)
    strides = kernels if stride is None else per_axis(name, "stride", stride, axes)
    dilations = per_axis(name, "dilation", dilation, axes)
    spans = tuple(d * (k - 1) + 1 for k, d in zip(kernels, dilations, strict=True))
    pads = paddings(name, padding, lengths, spans, strides)
    if any(max(p) > -(-k // 2) if padding == "same" else 2 * max(p) > k for p, k in zip(pads, spans, strict=True)):
        raise OptionError(f"{name}: padding is {shown(padding)}, expected at most half of the window {spans}")
    found = []
    for n, k, s, (low, high), d, span in zip(lengths, kernels, strides, pads, dilations, spans, strict=True):
        rest = n + low + high - span
        count = (-(-rest // s) if ceil else rest // s) + 1
        if ceil and (count - 1) * s >= n + low:  # a window may not start in the padding after the image
            count -= 1
        if n < 1 or count < 1:
            raise ShapeError(
                f"{name}: window {'x'.join(map(str, spans))} is larger than the input "
                f"{'x'.join(map(str, lengths))} with padding {padding}"
            )
        along = AxisWindows(n, k, s, low, high, d, count)
        if d > 1 and not along.divisors(count_include_pad=False).all():
            raise ShapeError(f"{name}: a window of dilation {d} lies in the padding alone; use less padding")
        found.append(along)
    return found
