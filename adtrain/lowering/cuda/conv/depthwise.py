"""Depthwise convolutions of channels-last images in bfloat16 or float32 (`kernels/cuda/conv/depthwise.cu`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from adtrain.core.kernel import MAX_GRID, WARP, CudaKernel, CudaLaunch, Target
from adtrain.core.types import BITS
from adtrain.lowering.cuda.conv.problem import FLOAT32, MAX_PIXELS, Direction, window_macros

FILE = "conv/depthwise.cu"
CHUNK = 8
"""Channels of a thread."""
STRIP = 4
"""Pixels of a thread, rounded up to the stride for an input gradient."""
THREADS, WEIGHT_GRAD_THREADS, RESIDENT = 256, 192, 2
"""Maximum threads of a block; of one for a weight gradient, which needs more registers; blocks of a multiprocessor."""
BLOCK_CHUNKS, BLOCK_STRIPS = range(4, 9), 8
"""Numbers of chunks of a block, of which the choice leaves the fewest threads idle; maximum strips of its rows."""
MAX_KERNEL, TAPS = 7, 9
"""Maximum rows and columns of a filter; taps of a weight gradient for which a thread has registers."""
LANES = 128
"""Multiply-adds of a multiprocessor in a cycle."""
INSTRUCTIONS = 1.5
"""Instructions for a multiply-add, with those that load and convert its operands."""
BYTES_PER_CYCLE = 2400
"""Bytes per cycle that memory reads and writes."""
START, SECOND_PASS = 4000, 4000
"""Cycles of the launch; cycles of the sum over splits."""


@dataclass(frozen=True)
class DepthwiseConv:
    """A depthwise convolution or gradient.

    Attributes:
        images: (N, H, W, C), the input.
        outputs: (N, OH, OW, C).
        kernel: (KH, KW).
        window: see `adtrain.ops.conv.Window`; its groups are the channels.
        dtype: of the operands: BITS for bfloat16, or float32.
    """

    direction: Direction
    images: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, int]
    window: Any
    dtype: np.dtype = BITS

    def fits(self) -> bool:
        """Whether each filter has one channel, chunks are aligned, registers suffice, and 32 bits count the pixels."""
        channels = self.images[3]
        depthwise = channels == self.outputs[3] == self.window.groups and channels % CHUNK == 0
        small = max(self.kernel) <= MAX_KERNEL and -(-channels // CHUNK) * self._tap_parts <= MAX_GRID[1]
        return depthwise and small and max(prod(self.images[:3]), prod(self.outputs[:3])) <= MAX_PIXELS

    @property
    def _strips_of(self) -> tuple[int, ...]:
        """The images whose rows are divided into strips."""
        return self.images if self.direction == Direction.INPUT_GRAD else self.outputs

    @property
    def _strip(self) -> int:
        step = self.window.stride[1] if self.direction == Direction.INPUT_GRAD else 1
        return -(-STRIP // step) * step

    @property
    def _block(self) -> tuple[int, int, int]:
        """Chunks, strips of a row, and rows of a block."""
        chunks, (n, rows, columns, _) = self.images[3] // CHUNK, self._strips_of
        across = chunks if chunks <= BLOCK_CHUNKS[-1] else min(BLOCK_CHUNKS, key=lambda x: (-chunks % x, -x))
        strips = -(-columns // self._strip)
        along = -(-strips // -(-strips // BLOCK_STRIPS))
        threads = WEIGHT_GRAD_THREADS if self.direction == Direction.WEIGHT_GRAD else THREADS
        return across, along, min(threads // (across * along), n * rows)

    @property
    def _tap_rows(self) -> int:
        """Rows of taps of a thread, for a weight gradient."""
        return min(self.kernel[0], max(1, TAPS // self.kernel[1])) if self.direction == Direction.WEIGHT_GRAD else 1

    @property
    def _tap_parts(self) -> int:
        return -(-self.kernel[0] // self._tap_rows) if self.direction == Direction.WEIGHT_GRAD else 1

    def kernels(self, target: Target) -> list[CudaKernel]:
        (across, along, down), (n, rows, columns, channels) = self._block, self._strips_of
        grid_y = -(-channels // (CHUNK * across)) * self._tap_parts
        tiles = -(-n * rows // down) * -(-columns // (self._strip * along))
        most = max(1, RESIDENT * target.multiprocessors // grid_y)
        blocks = -(-tiles // -(-tiles // most))
        macros = window_macros(self.kernel, *self.window[:3])
        lengths = {"IMAGE": self.images[1:3], "OUTPUT": self.outputs[1:3]}
        macros |= {f"{of}_{axis}": x for of, each in lengths.items() for axis, x in zip("HW", each, strict=True)}
        macros |= {"BLOCK_CHUNKS": across, "BLOCK_STRIPS": along, "BLOCK_ROWS": down, "STRIP": self._strip}
        macros |= {
            "OPERANDS_FLOAT32": int(self.dtype != BITS),
            "DIRECTION": int(self.direction),
            "CHANNELS": channels,
            "TAP_ROWS": self._tap_rows,
        }
        products = prod(self.outputs) * prod(self.kernel) * INSTRUCTIONS / (LANES * target.multiprocessors)
        moved = (prod(self.images) + prod(self.outputs)) * self.dtype.itemsize
        cycles = START + max(products, moved / BYTES_PER_CYCLE)

        def launch(name: str, number: int, **size: Any) -> CudaLaunch:
            return CudaLaunch(FILE, name, (number,), (FLOAT32,), definitions=macros, **size)

        grid = {"blocks": (blocks, grid_y), "threads": across * along * down}
        if self.direction != Direction.WEIGHT_GRAD:
            return [CudaKernel((launch("depthwise_conv", n, **grid),), 0, cycles)]
        results = channels * prod(self.kernel)
        add = launch("sum_depthwise_weight_grad", blocks, elements=results * WARP)
        first = launch("depthwise_weight_grad", n, **grid)
        return [CudaKernel((first, add), results * blocks * FLOAT32.itemsize, cycles + SECOND_PASS)]


def with_column_sums(kernel: CudaKernel, columns: int, sums: int) -> CudaKernel:
    """The kernel of a convolution or input gradient with an epilogue that adds columns of the result.

    The sums are an array in scratch memory: (blocks with the same channels, sums, columns).
    """
    (launch,) = kernel.launches
    assert isinstance(launch.blocks, tuple)
    return replace(kernel, scratch=launch.blocks[0] * sums * columns * FLOAT32.itemsize)
