"""The padded flat index of stride-1 convolutions (`kernels/cuda/conv/shifted.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from adtrain.core.precision import FULL, mantissa
from adtrain.core.target import Target
from adtrain.lowering.cuda.conv.problem import ConvProblem

CAPABILITY = (9, 0)
"""The compute capability whose instructions (wgmma) the kernels need."""
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

    def with_even_rows(self, min_pairs: int = 0) -> PaddedIndex:
        """The index whose rows have at least ``min_pairs`` pairs of positions and images an even number of rows."""
        wide = replace(self, min_pitch=max(2 * min_pairs, self.min_pitch))
        rows = wide.image_pitch // wide.pitch
        return replace(wide, min_pitch=wide.pitch, min_image_pitch=(rows + rows % 2) * wide.pitch)

    def supported(self, target: Target) -> bool:
        """Whether the kernels that use the index run this problem."""
        problem = self.problem
        if target.capability != CAPABILITY or problem.dtype.itemsize != 4:
            return False
        if problem.groups > 1 or not problem.unit_stride or min(problem.padding) < 0:
            return False
        sizes = math.prod(problem.images), math.prod(problem.outputs), self.count + self.reach + MAX_OVERRUN
        return 0 < min(sizes) <= max(sizes) < MAX_ELEMENTS
