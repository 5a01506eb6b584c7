"""ConvProblem: the shapes and parameters of a convolution, by which the rules choose a CUDA kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from adtrain.core.kernel import MAX_GRID, CudaKernel
from adtrain.core.precision import FULL, mantissa

FLOAT32 = np.dtype(np.float32)
MAX_PIXELS = (1 << 31) - 1024
"""Maximum of pixels of a channel in all images, so that 32 bits count them and a tile beyond the last one."""


@dataclass(frozen=True)
class ConvProblem:
    """A convolution y = x * w, or its gradient with respect to x or w, which has the same shapes.

    Attributes:
        images: shape of x, (N, C, H, W).
        outputs: shape of y, (N, O, OH, OW). The weights are (O, C / groups, KH, KW).
        kernel, stride, padding, dilation: (rows, columns) of the window.
        dtype: of all arrays.
        precision: what the operands are rounded to: "full", "tf32" or "bfloat16".
    """

    images: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int = 1
    dtype: np.dtype = FLOAT32
    precision: str = FULL

    @classmethod
    def of(
        cls,
        images: tuple[int, ...],
        outputs: tuple[int, ...],
        kernel: tuple[int, int],
        window: Any,
        dtype: np.dtype,
        precision: str,
    ) -> ConvProblem:
        """With stride, padding, dilation and groups of a `Window`."""
        stride, padding, dilation, groups = window
        return cls(images, outputs, kernel, stride, padding, dilation, groups, dtype, precision)

    @property
    def group_channels(self) -> int:
        return self.images[1] // self.groups

    @property
    def group_filters(self) -> int:
        return self.outputs[1] // self.groups

    @property
    def taps(self) -> int:
        """Filter taps, KH * KW."""
        return math.prod(self.kernel)

    @property
    def pixels(self) -> int:
        """Outputs of one filter, N * OH * OW."""
        return self.outputs[0] * math.prod(self.outputs[2:])

    @property
    def weights(self) -> int:
        """Elements of the weights."""
        return self.outputs[1] * self.group_channels * self.taps

    @property
    def unit_stride(self) -> bool:
        return tuple(self.stride) == (1, 1)

    def within_limits(self) -> bool:
        """Whether implicit GEMM can count its pixels and launch its grids."""
        pixels = self.images[0] * max(math.prod(self.images[2:]), math.prod(self.outputs[2:]))
        return pixels <= MAX_PIXELS and max(self.groups, math.prod(self.stride)) <= MAX_GRID[1]

    def transposed(self) -> ConvProblem:
        """The input gradient as a stride-1 convolution of the output gradient with flipped weights."""
        reach = [(length - 1) * step for length, step in zip(self.kernel, self.dilation, strict=True)]
        padding = reach[0] - self.padding[0], reach[1] - self.padding[1]
        return replace(self, images=self.outputs, outputs=self.images, padding=padding)

    def window_macros(self) -> Mapping[str, int]:
        names = ("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW")
        values = (*self.kernel, *self.stride, *self.padding, *self.dilation)
        return dict(zip(names, values, strict=True))

    def shape_macros(self) -> Mapping[str, int]:
        names = ("IN_CHANNELS", "IN_ROWS", "IN_COLUMNS", "OUT_CHANNELS", "OUT_ROWS", "OUT_COLUMNS")
        return dict(zip(names, (*self.images[1:], *self.outputs[1:]), strict=True))

    def mantissa_macro(self) -> Mapping[str, int]:
        return {"MANTISSA": mantissa(self.precision)}


class Algorithm(Protocol):
    """One way to compute a convolution: its kernels, the preferred one first, and an estimate of its time."""

    @property
    def cycles(self) -> float: ...

    def kernels(self) -> Sequence[CudaKernel]: ...
