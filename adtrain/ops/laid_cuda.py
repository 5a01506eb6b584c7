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
MEASURING, PART, MOST_PARTS = 256, 1 << 14, 8
"""Threads of a block that measures a filter, or a part of an image; elements of a part, or more where there would be
more parts of an image than so many."""
MEASURED, MOVED = 2200, 2250
"""Bytes in a cycle: measured, where each multiprocessor has two parts; and read and written to lay images out."""


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
        known = self.positions.images[0] * (1 + MOST_PARTS) * KNOWN
        return known + ALIGNED + self.chunks * self.count * (NUMBERS * LINE + 4)

    @property
    def parts(self) -> int:
        """Of an image, each of which a block measures (PARTS)."""
        return min(-(-math.prod(self.positions.images[1:]) // PART), MOST_PARTS)

    @property
    def groups(self) -> int:
        """Of lines; a block lays out a group of a chunk."""
        return self.count // LAID

    @property
    def cycles(self) -> float:
        """An estimate of the time that measuring and laying out take, but for the launches."""
        busy = min(self.positions.images[0] * self.parts / (2 * CHIP.multiprocessors), 1)
        return 4 * math.prod(self.positions.images) / (busy * MEASURED) + self.chunks * self.count * 4 * LINE / MOVED
