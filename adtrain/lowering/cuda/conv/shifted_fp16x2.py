"""Stride-1 convolutions by shifted implicit GEMM on Hopper, operands as fp16x2 (`kernels/cuda/conv/fp16x2.cuh`);
and weight gradients with 3 x 3 windows (`kernels/cuda/conv/shifted_weight_grad_fp16x2.cu`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adtrain.core.kernel import Arrays, CudaKernel, CudaLaunch, MemoryLayout, Target, lengths, memory_layout
from adtrain.lowering.cuda.conv.problem import MAX_OVERRUN, PaddedIndex
from adtrain.lowering.cuda.conv.shifted import (
    ALIGNED,
    FILTERS,
    IMAGE_STAGES,
    MAX_WEIGHT_STAGES,
    MIN_WEIGHT_STAGES,
    START,
    STATIC_SHARED,
    STATISTICS_BYTES,
    ShiftedConv,
)
from adtrain.lowering.cuda.conv.shifted_weight_grad import CHANNELS, EPILOGUE_CYCLES, SECOND_PASS, ShiftedWeightGrad

FILE = "conv/shifted_fp16x2.cu"
ROW_BYTES, ROW_CHANNELS, BLOCK_ROWS = 64, 32, 64
"""Bytes and channels of a packed row; rows that a block packs at a time."""
PACK_THREADS, PACK_BLOCKS = 256, 6
"""Threads of a block that packs images or computes their statistics; blocks per multiprocessor."""
THREADS = 384
"""Threads of a block that multiplies."""
MAX_PARTS = 32
"""Maximum of parts of an image; each has statistics of its own."""
PACKED_MACROS = {
    "ROW_BYTES": ROW_BYTES,
    "BLOCK_ROWS": BLOCK_ROWS,
    "PACK_BLOCKS": PACK_BLOCKS,
    "MAX_PARTS": MAX_PARTS,
    "MAX_OVERRUN": MAX_OVERRUN,
}
"""The macros that define the layout of packed images in scratch."""
PACKED_BYTES_PER_CYCLE = 1650
"""Bytes read and written in a cycle by packing, measured."""
TILE, FALLBACK_POSITIONS = 288, 144
"""Positions of a tile; positions of the unit that falls back to bf16x3 (FALLBACK_POSITIONS)."""
MULTIPLY_ADDS = {2: 1980, 1: 1600}
"""float16 multiply-adds of a multiprocessor per cycle, by the number of terms of an operand, measured."""
LAUNCH_CYCLES, TILE_CYCLES = 4000, 8700
"""Cycles of a launch that has nothing to do; cycles of a tile's epilogue."""


@dataclass(frozen=True)
class PackedImages:
    """Images as fp16x2 in scratch, in the order of the padded flat index (`conv/packed_images.cuh`)."""

    index: PaddedIndex

    @property
    def rows(self) -> int:
        """Rows of one term and one block of channels."""
        leading = -(-self.index.before // 8) * 8
        return -(-(self.index.count + leading + MAX_OVERRUN + self.index.reach) // BLOCK_ROWS) * BLOCK_ROWS

    @property
    def channel_blocks(self) -> int:
        """Blocks of ROW_CHANNELS channels."""
        return -(-self.index.problem.images[1] // ROW_CHANNELS)

    @property
    def layout(self) -> MemoryLayout:
        batch, rows = lengths(batch=self.index.problem.images[0], rows=self.channel_blocks * self.rows)
        arrays: Arrays = {
            "ROWS": (ROW_BYTES, rows * self.index.fp16_terms),
            "SQUARES": (4, rows),
            "STATISTICS": (STATISTICS_BYTES, batch),
            "PARTS": (STATISTICS_BYTES, batch * MAX_PARTS),
            "SMALL": (4, batch.rounded_up(ALIGNED)),
            "END": (1, 0),
        }
        return memory_layout("PACKED", arrays, batch, rows)

    @property
    def cycles(self) -> float:
        """An estimate of the time to read them twice and write them packed, without the launches."""
        written = self.channel_blocks * self.rows * self.index.fp16_terms * ROW_BYTES
        return (2 * 4 * math.prod(self.index.problem.images) + written) / PACKED_BYTES_PER_CYCLE


@dataclass(frozen=True)
class Fp16x2Conv:
    """A convolution in fp16x2, with a fallback to bf16x3 for what fp16x2 does not represent.

    Attributes:
        flipped: whether the weights are (C, O, KH, KW) with their taps in reverse order.
    """

    index: PaddedIndex
    target: Target
    flipped: bool

    @property
    def _fallback(self) -> ShiftedConv:
        return ShiftedConv(self.index, self.target, self.flipped)

    @property
    def _weight_stage_bytes(self) -> int:
        return self.index.fp16_terms * ROW_CHANNELS * FILTERS * 2

    def _shared(self, weight_stages: int) -> MemoryLayout:
        skipped = -self.index.before % 8
        rows = -(-(skipped + TILE + self.index.reach) // 8) * 8
        images = self.index.fp16_terms * rows * ROW_BYTES, IMAGE_STAGES
        arrays = {"IMAGES": images, "WEIGHTS": (self._weight_stage_bytes, weight_stages)}
        return memory_layout("SHARED", arrays, alignment=512)

    @property
    def _weight_stages(self) -> int:
        free = self.target.shared - STATIC_SHARED - self._shared(0)
        return min(free // self._weight_stage_bytes, MAX_WEIGHT_STAGES)

    @property
    def _tiles(self) -> int:
        return -(-self.index.count // TILE) * self._fallback.filter_blocks

    @property
    def _scratch(self) -> MemoryLayout:
        return self._fallback.scratch(self._tiles * (TILE // FALLBACK_POSITIONS), PackedImages(self.index).layout)

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        waves, terms = -(-self._tiles // self.target.multiprocessors), self.index.fp16_terms
        multiplied = 1 if terms == 1 else 3
        k = self.index.problem.taps * ROW_CHANNELS
        products = k * TILE * FILTERS * multiplied / MULTIPLY_ADDS[terms]
        before = START + 3 * LAUNCH_CYCLES + PackedImages(self.index).cycles
        return before + waves * (TILE_CYCLES + self._fallback.channel_blocks * products)

    def supported(self) -> bool:
        fallback = self._fallback
        fits = fallback.channels == ROW_CHANNELS and self._weight_stages >= MIN_WEIGHT_STAGES
        return fits and self.index.problem.outputs[1] > FILTERS // 2 and fallback.supported()

    def kernels(self) -> Sequence[CudaKernel]:
        """The launches: statistics, packing, products in fp16x2, fallback in bf16x3."""
        shared = self._shared(self._weight_stages)
        multiply = CudaLaunch(
            FILE,
            "conv_shifted_fp16x2",
            self.index.problem.images[:1],
            (self.index.problem.dtype,),
            blocks=min(self._tiles, self.target.multiprocessors),
            threads=THREADS,
            shared=shared,
            definitions={**self._fallback.macros(), **PACKED_MACROS, "WEIGHT_STAGES": self._weight_stages},
            layouts=(self._scratch, PackedImages(self.index).layout),
        )
        fallback = self._fallback.multiply(self._scratch, fallback=True)
        return [CudaKernel((*_packing(multiply, shared, self.target), multiply, fallback), self._scratch)]


WEIGHT_GRAD_FILE = "conv/shifted_weight_grad_fp16x2.cu"
WEIGHT_GRAD_THREADS, STEP, STAGE = 512, 16, 128
"""Threads of a block; positions of one wgmma; positions of a stage."""
MIN_STAGES, MAX_STAGES = 2, 4
WEIGHT_GRAD_MULTIPLY_ADDS = {2: 1500, 1: 1150}
"""float16 multiply-adds of a multiprocessor per cycle, by the number of terms of an operand, measured."""


@dataclass(frozen=True)
class Fp16x2WeightGrad:
    """The weight gradient in fp16x2, with a fallback to bf16x3 for what fp16x2 does not represent."""

    index: PaddedIndex
    target: Target

    @property
    def _fallback(self) -> ShiftedWeightGrad:
        return ShiftedWeightGrad(self.index, self.target)

    @property
    def _gradient_index(self) -> PaddedIndex:
        return PaddedIndex(self.index.problem.transposed())

    @property
    def _stage_bytes(self) -> int:
        image_rows = (7 + STAGE + self.index.reach + 7) // 8 * 8
        return ROW_BYTES * self.index.fp16_terms * (image_rows + 2 * (STAGE + 8))

    @property
    def _stages(self) -> int:
        return min((self.target.shared - STATIC_SHARED - 1024) // self._stage_bytes, MAX_STAGES)

    @property
    def _shared(self) -> MemoryLayout:
        return memory_layout("SHARED", {"STAGES": (self._stage_bytes, self._stages)}, alignment=1024)

    @property
    def _steps(self) -> int:
        """Steps from an image's first output to its last."""
        _, _, rows, columns = self.index.problem.outputs
        return -(-((rows - 1) * self.index.pitch + columns) // STEP)

    @property
    def _splits(self) -> int:
        """Splits of the images among blocks."""
        return max(1, min(self.target.multiprocessors // self._fallback.blocks, self.index.problem.images[0]))

    @property
    def _packed(self) -> tuple[PackedImages, PackedImages]:
        """Images and gradients."""
        return PackedImages(self.index), PackedImages(self._gradient_index)

    @property
    def _scratch(self) -> MemoryLayout:
        return self._fallback.scratch(self._splits, sum(packed.layout for packed in self._packed))

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        problem, terms = self.index.problem, self.index.fp16_terms
        count = (3 if terms == 2 else 1) / WEIGHT_GRAD_MULTIPLY_ADDS[terms]
        products = FILTERS * CHANNELS * problem.taps * self._steps * STEP * count
        waves = -(-self._fallback.blocks * self._splits // self.target.multiprocessors)
        multiplied = waves * (EPILOGUE_CYCLES + -(-problem.images[0] // self._splits) * products)
        before = 3 * LAUNCH_CYCLES + sum(packed.cycles for packed in self._packed)
        return START + before + multiplied + SECOND_PASS

    def supported(self) -> bool:
        fits = self._stages >= MIN_STAGES and self._steps * STEP <= self.index.image_pitch
        return fits and self._fallback.supported() and self._gradient_index.supported(self.target)

    def kernels(self) -> Sequence[CudaKernel]:
        """The launches: statistics, packing, products in fp16x2, fallback in bf16x3, sum of the splits."""
        stages = {"STAGE_CHANNELS": CHANNELS, "PIPELINE_STAGES": self._stages}
        multiply = CudaLaunch(
            WEIGHT_GRAD_FILE,
            "weight_grad_shifted_fp16x2",
            (self.index.problem.images[0], self._splits),
            (self.index.problem.dtype,),
            blocks=(self._fallback.blocks, self._splits),
            threads=WEIGHT_GRAD_THREADS,
            shared=self._shared,
            definitions={**self.index.macros(), **PACKED_MACROS, **stages},
            layouts=(self._scratch, self._packed[0].layout),
        )
        fallback = self._fallback.split_into(self._splits, self._scratch)
        return [
            CudaKernel((*_packing(multiply, self._shared, self.target), multiply, *fallback.launches), self._scratch)
        ]


def _packing(multiply: CudaLaunch, shared: MemoryLayout, target: Target) -> Sequence[CudaLaunch]:
    """The launches before the products: statistics of the operands, and packing.

    Args:
        shared: the layout of shared memory of ``multiply``, whose macros the file needs.
    """
    layouts = (*multiply.layouts, shared)
    both = replace(
        multiply, blocks=PACK_BLOCKS * target.multiprocessors, threads=PACK_THREADS, shared=0, layouts=layouts
    )
    return [replace(both, name=name) for name in ("measure_operands", "pack_operands")]
