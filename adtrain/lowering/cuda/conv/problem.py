"""ConvProblem: the shapes and parameters of a convolution, by which the rules choose a CUDA kernel; PaddedIndex:
the positions of its images in the kernels of stride-1 convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import numpy as np

from adtrain.core.kernel import HOPPER, MAX_GRID, CudaKernel, Target
from adtrain.core.precision import FULL, mantissa

FLOAT32 = np.dtype(np.float32)
MAX_PIXELS = (1 << 31) - 1024
"""Maximum of pixels of a channel in all images, so that 32 bits count them and a tile beyond the last one."""


class Direction(IntEnum):
    """What is computed, as the macros of the kernel."""

    FORWARD = 0
    INPUT_GRAD = 1
    WEIGHT_GRAD = 2


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

    def window_macros(self) -> dict[str, int]:
        return window_macros(self.kernel, self.stride, self.padding, self.dilation)

    def shape_macros(self) -> Mapping[str, int]:
        names = ("IN_CHANNELS", "IN_ROWS", "IN_COLUMNS", "OUT_CHANNELS", "OUT_ROWS", "OUT_COLUMNS")
        return dict(zip(names, (*self.images[1:], *self.outputs[1:]), strict=True))

    def mantissa_macro(self) -> Mapping[str, int]:
        return {"MANTISSA": mantissa(self.precision)}


def window_macros(*pairs: tuple[int, int]) -> dict[str, int]:
    """The macros for the rows and columns of a window, of its strides, its padding and its dilation."""
    names = ("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW")
    return dict(zip(names, (n for pair in pairs for n in pair), strict=False))


class Algorithm(Protocol):
    """One way to compute a convolution: its kernels, the preferred one first, and an estimate of its time."""

    @property
    def cycles(self) -> float: ...

    def kernels(self) -> Sequence[CudaKernel]: ...


MAX_ELEMENTS = 1 << 31
"""Maximum of elements of an array, for 32-bit offsets."""
MAX_OVERRUN = 384
"""Maximum of positions that a tile may read before the first position and after the last."""


@dataclass(frozen=True)
class PaddedIndex:
    """The positions of a problem's images in one flat index.

    Rows are `pitch` positions apart and images `image_pitch`, with zeros between them. So a tap is a constant offset.

    Attributes:
        min_pitch, min_image_pitch: the minimum of `pitch`, and of `image_pitch`.
    """

    problem: ConvProblem
    min_pitch: int = 0
    min_image_pitch: int = 0

    @property
    def pitch(self) -> int:
        """Even, so that two neighbouring outputs are one aligned access."""
        _, _, _, columns = self.problem.images
        pitch = max(columns + self.problem.padding[1], self.problem.outputs[3], self.min_pitch)
        return pitch + pitch % 2

    @property
    def image_pitch(self) -> int:
        """A multiple of `pitch`."""
        rows = max(self.problem.images[2] + self.problem.padding[0], self.problem.outputs[2])
        return self.pitch * max(rows, -(-self.min_image_pitch // self.pitch))

    @property
    def count(self) -> int:
        """Positions of all images."""
        return self.problem.images[0] * self.image_pitch

    @property
    def before(self) -> int:
        """Positions from the first tap to the output."""
        return self.problem.padding[0] * self.pitch + self.problem.padding[1]

    @property
    def reach(self) -> int:
        """Positions from the first tap to the last."""
        (rows, columns), (down, right) = self.problem.kernel, self.problem.dilation
        return (rows - 1) * down * self.pitch + (columns - 1) * right

    @property
    def fp16_terms(self) -> int:
        """float16 terms of an operand: two, or one if operands are rounded."""
        return 2 if self.problem.precision == FULL else 1

    @property
    def bf16_terms(self) -> int:
        """bfloat16 terms of an operand: three, or fewer if operands are rounded."""
        return -(-(mantissa(self.problem.precision) + 1) // 8)

    @property
    def k_major_bytes(self) -> int:
        """Bytes of all terms of an element of a K-major operand (`KMajorOperand`): bf16x3, tf32 or bfloat16."""
        return {FULL: 6, "tf32": 4, "bfloat16": 2}[self.problem.precision]

    def macros(self) -> Mapping[str, int]:
        strides = ("SH", "SW")  # always 1
        window = {name: value for name, value in self.problem.window_macros().items() if name not in strides}
        index = {"PITCH": self.pitch, "IMAGE_PITCH": self.image_pitch}
        return {**window, **self.problem.shape_macros(), **index, **self.problem.mantissa_macro()}

    def tiled_by_image(self, tile: int, rows: int) -> tuple[PaddedIndex, int]:
        """The index whose images begin with a tile of ``tile`` positions each, and the tiles of an image.

        Args:
            rows: output rows that the tiles cover.
        """
        tiles = -(-((rows - 1) * self.pitch + self.problem.outputs[3]) // tile)
        return replace(self, min_pitch=self.pitch, min_image_pitch=tiles * tile), tiles

    def with_even_rows(self, min_pairs: int) -> PaddedIndex:
        """The index whose rows have at least ``min_pairs`` pairs of positions and images an even number of rows."""
        wide = replace(self, min_pitch=max(2 * min_pairs, self.min_pitch))
        rows = wide.image_pitch // wide.pitch
        return replace(wide, min_pitch=wide.pitch, min_image_pitch=(rows + rows % 2) * wide.pitch)

    def supported(self, target: Target) -> bool:
        """Whether the kernels that use the index run this problem."""
        problem = self.problem
        if target.capability != HOPPER or problem.dtype.itemsize != 4:
            return False
        if problem.groups > 1 or not problem.unit_stride or min(problem.padding) < 0:
            return False
        sizes = math.prod(problem.images), math.prod(problem.outputs), self.count + self.reach + MAX_OVERRUN
        return 0 < min(sizes) <= max(sizes) < MAX_ELEMENTS
