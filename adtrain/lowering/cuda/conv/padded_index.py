"""Convolutions with stride 1 as products of positions (`kernels/cuda/conv/shifted.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.precision import FULL, mantissa

CAPABILITY = (9, 0)
"""The compute capability whose instructions the kernels consist of."""
MOST_ELEMENTS = 1 << 31
"""Of an array, so that 32 bits count them."""
BEYOND = 320
"""Positions, at most, that a tile has behind the last one, with those in front of the first."""


@dataclass(frozen=True)
class Positions:
    """A convolution with stride 1 and without groups.

    Attributes:
        images: (N, C, H, W) of what windows are taken of.
        outputs: (N, O, OH, OW).
        kernel, padding, dilation: of the window, rows and columns.
        precision: what its operands are rounded to.
        spread: positions, at least, from a row to the next, and from an image to the next.
    """

    images: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    precision: str = FULL
    spread: tuple[int, int] = (0, 0)

    @property
    def pitch(self) -> int:
        """Positions from a row to the next: even, so that two neighbours in memory are one access."""
        columns = max(self.images[3] + self.padding[1], self.outputs[3], self.spread[0])
        return columns + columns % 2

    @property
    def image(self) -> int:
        """Positions from an image to the next."""
        rows = max(self.images[2] + self.padding[0], self.outputs[2])
        return self.pitch * max(rows, -(-self.spread[1] // self.pitch))

    @property
    def count(self) -> int:
        return self.images[0] * self.image

    @property
    def before(self) -> int:
        """Positions that a window reaches back."""
        return self.padding[0] * self.pitch + self.padding[1]

    @property
    def reach(self) -> int:
        """Positions from the first to the last element of a window."""
        (rows, columns), (down, right) = self.kernel, self.dilation
        return (rows - 1) * down * self.pitch + (columns - 1) * right

    @property
    def numbers(self) -> int:
        """Of float16 that hold one of the precision, scaled (`kernels/cuda/conv/fp16x2.cuh`)."""
        return 2 if self.precision == FULL else 1

    @property
    def pieces(self) -> int:
        """The same of bfloat16, as they are (`kernels/cuda/sm90/bf16x3.cuh`)."""
        return -(-(mantissa(self.precision) + 1) // 8)

    @property
    def definitions(self) -> Mapping[str, int]:
        pairs = (("KH", "KW"), self.kernel), (("PH", "PW"), self.padding), (("DH", "DW"), self.dilation)
        macros = {name: value for names, values in pairs for name, value in zip(names, values, strict=True)}
        names = ("IN_CHANNELS", "IN_ROWS", "IN_COLUMNS", "OUT_CHANNELS", "OUT_ROWS", "OUT_COLUMNS", "PITCH", "IMAGE")
        lengths = (*self.images[1:], *self.outputs[1:], self.pitch, self.image)
        return {**macros, **dict(zip(names, lengths, strict=True)), "MANTISSA": mantissa(self.precision)}

    def turned(self) -> Positions:
        """The convolution of the outputs' gradients that is the gradient by the images."""
        reach = [(length - 1) * step for length, step in zip(self.kernel, self.dilation, strict=True)]
        padding = reach[0] - self.padding[0], reach[1] - self.padding[1]
        return replace(self, images=self.outputs, outputs=self.images, padding=padding)

    def by_image(self, tile: int, rows: int) -> tuple[Positions, int]:
        """Spread so that tiles of so many positions begin with each image; how many cover so many rows of outputs."""
        count = -(-((rows - 1) * self.pitch + self.outputs[3]) // tile)
        return replace(self, spread=(self.pitch, count * tile)), count

    def of_whole_windows(self, pairs: int = 0) -> Positions:
        """Spread so that rows are so many pairs of positions apart at least, and images an even number of rows."""
        wide = replace(self, spread=(max(2 * pairs, self.spread[0]), self.spread[1]))
        rows = wide.image // wide.pitch
        return replace(wide, spread=(wide.pitch, (rows + rows % 2) * wide.pitch))

    def suits(self) -> bool:
        """Whether positions are right for it, on the GPU at hand."""
        sizes = (*map(math.prod, (self.images, self.outputs)), self.count + self.reach + BEYOND)
        return CHIP.capability == CAPABILITY and min(self.padding) >= 0 and 0 < min(sizes) <= max(sizes) < MOST_ELEMENTS
