"""Images in halves, as convolutions on Hopper's matrix units are brought them (`Laid` in `kernels/cuda/scaled.cuh`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adtrain.core.chip import CHIP
from adtrain.ops.positions import BEYOND, Positions

NUMBERS, KNOWN = 2, 16
"""That a float32 becomes; bytes of what is known of an image or a filter."""
LINE, OF_LINE, LAID, LAYING = 64, 32, 64, 256
"""Bytes and channels of a line; lines and threads of a block that lays images out."""
ALIGNED = 1024
"""Bytes that lines are aligned to."""
MEASURING, FEW_IMAGES = (256, 1024), 4
"""Threads of a block that measures an image, where they are many or few: fewer than so many for each multiprocessor."""
MEASURED, MOVED = 2200, 2250
"""Bytes in a cycle: measured, where each multiprocessor has an image; and read and written to lay images out."""


@dataclass(frozen=True)
class Laid:
    """The images of a convolution."""

    positions: Positions

    @property
    def count(self) -> int:
        """Lines of a number and a chunk of channels."""
        front = -(-self.positions.before // 8) * 8
        return -(-(self.positions.count + front + BEYOND + self.positions.reach) // LAID) * LAID

    @property
    def chunks(self) -> int:
        """Of channels."""
        return -(-self.positions.images[1] // OF_LINE)

    @property
    def bytes(self) -> int:
        """With what it takes to align them."""
        return self.positions.images[0] * KNOWN + ALIGNED + self.chunks * self.count * (NUMBERS * LINE + 4)

    @property
    def measuring(self) -> int:
        """Threads of a block that measures."""
        many, few = MEASURING
        return many if self.positions.images[0] >= FEW_IMAGES * CHIP.multiprocessors else few

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks that lay out."""
        return self.count // LAID, self.chunks

    @property
    def cycles(self) -> float:
        """An estimate of the time that measuring and laying out take, but for the launches."""
        busy = min(self.positions.images[0] / CHIP.multiprocessors, 1)
        return 4 * math.prod(self.positions.images) / (busy * MEASURED) + self.chunks * self.count * 4 * LINE / MOVED
