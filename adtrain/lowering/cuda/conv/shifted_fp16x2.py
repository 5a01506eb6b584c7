"""Stride-1 convolutions by shifted implicit GEMM on Hopper, operands as fp16x2 (`kernels/cuda/conv/fp16x2.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.target import Target
from adtrain.lowering.cuda.conv.padded_index import MAX_OVERRUN, PaddedIndex
from adtrain.lowering.cuda.conv.shifted import (
    FILTERS,
    IMAGE_STAGES,
    MAX_WEIGHT_STAGES,
    MIN_WEIGHT_STAGES,
    START,
    STATIC_SHARED,
    THREADS,
    ShiftedConv,
)

STATISTICS_BYTES = 16
"""Of an image or a filter."""
ROW_BYTES, ROW_CHANNELS, BLOCK_ROWS = 64, 32, 64
"""Of a packed row, a position's channels; rows that a block packs at a time."""
PACK_THREADS, PACK_BLOCKS = 256, 6
"""Threads of a block that measures and packs images; blocks of a multiprocessor."""
ALIGNMENT = 1024
"""Of packed rows, in bytes."""
MAX_PARTS = 32
"""Parts of an image that are measured separately, at most."""
PACKED_MACROS = {
    "STATISTICS_BYTES": STATISTICS_BYTES,
    "ROW_BYTES": ROW_BYTES,
    "BLOCK_ROWS": BLOCK_ROWS,
    "PACK_BLOCKS": PACK_BLOCKS,
    "MAX_PARTS": MAX_PARTS,
    "MAX_OVERRUN": MAX_OVERRUN,
}
"""What the layout of packed images in scratch follows from."""
PACKED_BYTES_PER_CYCLE = 1650
"""Bytes read and written in a cycle by packing, measured."""
TILE, MARKED = 288, 144
"""Positions of a tile; of the unit that falls back to bf16x3."""
MULTIPLY_ADDS = {2: 1980, 1: 1600}
"""Of a multiprocessor in a cycle, by the number of float16 parts of an operand, measured."""
LAUNCH_CYCLES, EPILOGUE_CYCLES = 4000, 8700
"""Of a launch that has nothing to do; of a tile."""


@dataclass(frozen=True)
class PackedImages:
    """Images as fp16x2 in scratch, in the order of the padded flat index (`conv/packed_images.cuh`)."""

    index: PaddedIndex

    @property
    def rows(self) -> int:
        """Rows of one part and one chunk of channels."""
        front = -(-self.index.before // 8) * 8
        return -(-(self.index.count + front + MAX_OVERRUN + self.index.reach) // BLOCK_ROWS) * BLOCK_ROWS

    @property
    def chunks(self) -> int:
        """Chunks of ROW_CHANNELS channels."""
        return -(-self.index.problem.images[1] // ROW_CHANNELS)

    @property
    def bytes(self) -> int:
        """With alignment."""
        statistics = self.index.problem.images[0] * ((1 + MAX_PARTS) * STATISTICS_BYTES + 4)
        return statistics + ALIGNMENT + self.chunks * self.rows * (self.index.fp16_parts * ROW_BYTES + 4)

    @property
    def cycles(self) -> float:
        """An estimate of the time to read them twice and write them packed, without the launches."""
        written = self.chunks * self.rows * self.index.fp16_parts * ROW_BYTES
        return (2 * 4 * math.prod(self.index.problem.images) + written) / PACKED_BYTES_PER_CYCLE


@dataclass(frozen=True)
class Fp16x2Conv:
    """A convolution in fp16x2, which falls back to bf16x3 for what fp16x2 does not hold.

    Attributes:
        flipped: whether the weights are (C, O, KH, KW) with their elements in reverse order.
    """

    index: PaddedIndex
    target: Target
    flipped: bool

    @property
    def _fallback(self) -> ShiftedConv:
        return ShiftedConv(self.index, self.target, self.flipped)

    @property
    def _weight_stage_bytes(self) -> int:
        return self.index.fp16_parts * ROW_CHANNELS * FILTERS * 2

    @property
    def _fixed_bytes(self) -> int:
        """Dynamic shared memory beside the stages of weights, with its alignment."""
        skipped = -self.index.before % 8
        rows = -(-(skipped + TILE + self.index.reach) // 8) * 8
        return IMAGE_STAGES * self.index.fp16_parts * rows * ROW_BYTES + 512

    @property
    def _weight_stages(self) -> int:
        free = self.target.shared - STATIC_SHARED - self._fixed_bytes
        return min(free // self._weight_stage_bytes, MAX_WEIGHT_STAGES)

    @property
    def _shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self._fixed_bytes + self._weight_stages * self._weight_stage_bytes

    @property
    def _tiles(self) -> int:
        return -(-self.index.count // TILE) * self._fallback.filter_blocks

    @property
    def _scratch(self) -> int:
        """Bytes: of `ConvScratch` (shifted_tiles.cuh) and `PackedImages` (packed_images.cuh)."""
        blocks = self._fallback.filter_blocks
        weights = (self._fallback.weight_parts + self.index.fp16_parts) * self._fallback.weight_bytes
        statistics = blocks * FILTERS * STATISTICS_BYTES
        marks = self._tiles * (TILE // MARKED) * 4
        return weights + statistics + marks + ALIGNMENT + PackedImages(self.index).bytes

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        waves, parts = -(-self._tiles // self.target.multiprocessors), self.index.fp16_parts
        multiplied = 1 if parts == 1 else 3
        k = self.index.problem.taps * ROW_CHANNELS
        products = k * TILE * FILTERS * multiplied / MULTIPLY_ADDS[parts]
        before = START + 3 * LAUNCH_CYCLES + PackedImages(self.index).cycles
        return before + waves * (EPILOGUE_CYCLES + self._fallback.channel_chunks * products)

    def supported(self) -> bool:
        fallback = self._fallback
        fits = fallback.channels == ROW_CHANNELS and self._weight_stages >= MIN_WEIGHT_STAGES
        return fits and not fallback.stacked and fallback.supported()

    def kernels(self) -> Sequence[CudaKernel]:
        """Statistics and packing of the operands, the products in fp16x2, and the others in bf16x3."""
        multiprocessors = self.target.multiprocessors
        launches = (
            self._launch("conv/pack_images.cu", "measure_operands", PACK_BLOCKS * multiprocessors, PACK_THREADS),
            self._launch("conv/pack_images.cu", "pack_operands", PACK_BLOCKS * multiprocessors, PACK_THREADS),
            self._launch(
                "conv/shifted_fp16x2.cu",
                "conv_shifted_fp16x2",
                min(self._tiles, multiprocessors),
                THREADS,
                self._shared,
            ),
            self._fallback.multiply(fallback=True),
        )
        return [CudaKernel(launches, self._scratch)]

    def _launch(self, file: str, name: str, blocks: int, threads: int, shared: int = 0) -> CudaLaunch:
        problem = self.index.problem
        macros = {
            **self._fallback.macros(),
            **PACKED_MACROS,
            "WEIGHT_STAGES": self._weight_stages,
            "SHARED_BYTES": self._shared,
            "WEIGHT_BYTES": self._fallback.weight_parts * self._fallback.weight_bytes,
            "FP16_WEIGHT_BYTES": self.index.fp16_parts * self._fallback.weight_bytes,
        }
        numbers, types = problem.images[:1], (problem.dtype,)
        return CudaLaunch(file, name, numbers, types, blocks=blocks, threads=threads, shared=shared, definitions=macros)
