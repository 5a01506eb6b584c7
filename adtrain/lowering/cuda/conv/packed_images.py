"""Images in halves, as convolutions on Hopper's matrix units are brought them (`conv/packed_images.cuh`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adtrain.lowering.cuda.conv.padded_index import BEYOND, Positions

KNOWN = 16
"""Bytes of what is known of an image or a filter."""
LINE, OF_LINE, LAID = 64, 32, 64
"""Bytes and channels of a line; lines that a block lays out at a time."""
LAYING, LAYING_BLOCKS = 256, 6
"""Threads of a block that measures images and lays them out; how many a multiprocessor has at once."""
ALIGNED = 1024
"""Bytes that lines are aligned to."""
MOST_PARTS = 32
"""Of an image that are measured apart, at most."""
MOVED = 1650
"""Bytes in a cycle that are read once and written, measured."""


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
        known = self.positions.images[0] * ((1 + MOST_PARTS) * KNOWN + 4) + 4
        return known + ALIGNED + self.chunks * self.count * (self.positions.numbers * LINE + 4)

    @property
    def cycles(self) -> float:
        """An estimate of the time that this takes, but for the launches."""
        written = self.chunks * self.count * self.positions.numbers * LINE
        return (4 * math.prod(self.positions.images) + written) / MOVED
