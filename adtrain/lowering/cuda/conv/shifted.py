"""Stride-1 convolutions by shifted implicit GEMM on Hopper: bf16x3, tf32, bfloat16 (`kernels/cuda/conv/shifted*`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from adtrain.core.kernel import Arrays, CudaKernel, CudaLaunch, MemoryLayout, Target, lengths, memory_layout
from adtrain.lowering.cuda.conv.problem import PaddedIndex

FILE = "conv/shifted_bf16x3.cu"
BF16X3_TERMS, CHUNK_ELEMENTS, WARPGROUP = 3, 8, 128
"""bfloat16 terms of a float32; channels of a chunk, the unit of layouts in shared memory; threads of a warpgroup."""
FILTERS, MAX_COLUMNS, MIN_COLUMNS, COLUMN_STEP = 64, 128, 64, 8
"""Rows of a tile; maximum, minimum and granularity of the positions of a warpgroup."""
PRODUCERS, FULL_PRODUCERS, CONSUMERS, FULL_CONSUMERS = 256, 128, 3, 2
"""Threads of a block that load, for rounded operands and for full precision, whose products take more time and
registers; warpgroups that multiply, for both."""
IMAGE_STAGES, MIN_WEIGHT_STAGES, MAX_WEIGHT_STAGES = 2, 3, 8
"""Stages in shared memory: of images, and of weights."""
STAGE_CHANNELS = 32, 16
"""Channels of a stage, the faster choice first."""
STATISTICS_BYTES, ALIGNED = 16, 32
"""Bytes of the statistics of an image or a filter in fp16x2; 32-bit numbers of a cache line, at which arrays begin."""
STATIC_SHARED = 1 << 10
"""Bytes of shared memory of a block that are static or reserved by the system."""
LOADER_BYTES = 4 * CHUNK_ELEMENTS * 4
"""Bytes of shared memory for the loads in flight of a thread that loads images of a weight gradient."""
MAX_FILTER_BLOCKS = 128
"""Maximum of tiles of the same positions, so that the statistics of their filters fit into shared memory."""
PRODUCTS = {3: 6, 2: 5.25, 1: 4.5}
"""The time of a weight gradient's products by number of terms, in units of one of the six bf16x3 products, measured."""
STACKED_PRODUCTS, K_MAJOR_PRODUCTS = 4, {6: 6, 4: 2.5, 2: 1.5}
"""The time of a convolution's products in the same units: in bf16x3 if stacked, and by bytes of an element. For rounded
operands it is an estimate: of two products in tf32, one in bfloat16, and the wait after each filter tap."""
PRODUCT_CYCLES, COLUMN_CYCLES, PRODUCT_K = 14.4, 0.451, 16
"""Cycles of one wgmma of PRODUCT_K, and of each of its columns, measured."""
GATHERED = 1.2
"""Elements of images that a multiprocessor gathers in a cycle, measured."""
START, EPILOGUE_CYCLES = 6000, 10
"""Cycles from the launch to the first full stages; cycles of the epilogue for each position of a tile."""


def weight_stages(possible: int, of_all: int) -> int:
    """Stages of weights in shared memory.

    Args:
        possible: how many fit.
        of_all: how many hold all weights. If these fit, a block loads the weights once.
    """
    return of_all if MIN_WEIGHT_STAGES <= of_all <= possible else min(possible, MAX_WEIGHT_STAGES)


@dataclass(frozen=True)
class ShiftedConv:
    """A convolution, or its input gradient as a convolution of the output gradient.

    Attributes:
        flipped: whether the weights are (C, O, KH, KW) with their taps in reverse order.
        pooled: whether the epilogue pools windows of 2 x 2.
        columns: positions of a warpgroup.
        image_tiles: tiles of one image, if each image starts with a tile; 0 if tiles cover the flat index without gaps.
    """

    index: PaddedIndex
    target: Target
    flipped: bool
    pooled: bool = False
    columns: int = MAX_COLUMNS
    image_tiles: int = 0

    @property
    def stacked(self) -> bool:
        """Whether a tile stacks two terms of each filter, and so has half as many filters."""
        return self.index.problem.outputs[1] <= FILTERS // 2 and self.index.bf16_terms == BF16X3_TERMS

    @property
    def _filters(self) -> int:
        """Filters of a tile."""
        return FILTERS // 2 if self.stacked else FILTERS

    @property
    def filter_blocks(self) -> int:
        """Tiles of the same positions."""
        return -(-self.index.problem.outputs[1] // self._filters)

    def best(self) -> ShiftedConv | None:
        """The fastest supported choice of tiles by estimate."""
        return min((c for c in self.choices() if c.supported()), key=lambda c: c.cycles, default=None)

    def choices(self) -> Iterator[ShiftedConv]:
        """This convolution with every choice of tiles. With pooling each thread has whole pairs of rows."""
        shares = 2 if self.stacked else 1  # threads that share a column of a warpgroup
        for columns in range(MAX_COLUMNS, MIN_COLUMNS - 1, -COLUMN_STEP * shares):
            if not self.pooled:
                yield replace(self, columns=columns)
                yield self._tiled_by_image(columns, self.index.problem.outputs[2])
                continue
            own, min_pitch = columns // shares, self.index.pitch
            for pitch in (own // rows for rows in range(2, own // min_pitch + 1, 2) if own % rows == 0):
                if pitch % 2 == 0:
                    wide = replace(self, index=replace(self.index, min_pitch=pitch, min_image_pitch=0))
                    yield wide._tiled_by_image(columns, self.index.problem.outputs[2] // 2 * 2)

    def _tiled_by_image(self, columns: int, rows: int) -> ShiftedConv:
        index, tiles = self.index.tiled_by_image(self._consumers * columns, rows)
        return replace(self, index=index, columns=columns, image_tiles=tiles)

    @property
    def tile(self) -> int:
        """Positions of a tile."""
        return self._consumers * self.columns

    def _weight_stage_bytes(self, channels: int) -> int:
        return channels * FILTERS * (4 if self.stacked else self.index.k_major_bytes)

    def _shared(self, channels: int, weight_stages: int) -> MemoryLayout:
        combined = self.tile * FILTERS // 2 if self.stacked else 0
        images = self.index.k_major_bytes * channels * (self.tile + self.index.reach)
        weights = self._weight_stage_bytes(channels), weight_stages
        arrays = {"IMAGES": (images, IMAGE_STAGES), "WEIGHTS": weights, "COMBINED": (4, combined)}
        return memory_layout("SHARED", arrays, alignment=128)

    def _weight_stages(self, channels: int) -> int:
        free = self.target.shared - STATIC_SHARED - self._shared(channels, 0)
        of_all = self.filter_blocks * -(-self.index.problem.images[1] // channels) * self.index.problem.taps
        return weight_stages(free // self._weight_stage_bytes(channels), of_all)

    @property
    def _rounded(self) -> bool:
        """Whether operands have one term."""
        return self.index.k_major_bytes < 2 * BF16X3_TERMS

    @property
    def _producers(self) -> int:
        """Threads of a block that load."""
        return PRODUCERS if self._rounded else FULL_PRODUCERS

    @property
    def _consumers(self) -> int:
        """Warpgroups that multiply."""
        return CONSUMERS if self._rounded else FULL_CONSUMERS

    @property
    def channels(self) -> int:
        """Channels of a stage; 0 if no choice fits into shared memory."""
        return next((n for n in STAGE_CHANNELS if self._weight_stages(n) >= MIN_WEIGHT_STAGES), 0)

    @property
    def shared(self) -> MemoryLayout:
        return self._shared(self.channels, self._weight_stages(self.channels))

    @property
    def tiles(self) -> int:
        of_filter_block = self.index.problem.images[0] * self.image_tiles or -(-self.index.count // self.tile)
        return of_filter_block * self.filter_blocks

    @property
    def channel_blocks(self) -> int:
        """Blocks of channels, each of a stage."""
        return -(-self.index.problem.images[1] // self.channels)

    @property
    def products(self) -> int:
        """K of the sums, padded channels included."""
        return self.index.problem.taps * self.channel_blocks * self.channels

    def scratch(self, marks: int | None = None, packed: int = 0) -> MemoryLayout:
        """The layout of scratch, `ConvScratch` in `conv/shifted_tiles.cuh`.

        Args:
            marks: for operands as fp16x2, how many units may fall back.
            packed: bytes of the packed images.
        """
        (count,) = lengths(marks=marks or 0)
        fp16x2, stages = marks is not None, self.filter_blocks * self.channel_blocks * self.index.problem.taps
        arrays: Arrays = {
            "K_MAJOR_WEIGHTS": (self._weight_stage_bytes(self.channels), stages),
            "FP16_WEIGHTS": (self.index.fp16_terms * self.channels * FILTERS * 2, stages if fp16x2 else 0),
            "FILTERS": (STATISTICS_BYTES, self.filter_blocks * FILTERS if fp16x2 else 0),
            "MARKS": (4, count.rounded_up(ALIGNED)),
            "PACKED": (1, packed),
        }
        return memory_layout("SCRATCH", arrays, count)

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        waves = -(-self.tiles // self.target.multiprocessors)
        k = self.index.problem.taps * self.channels
        products = STACKED_PRODUCTS if self.stacked else K_MAJOR_PRODUCTS[self.index.k_major_bytes]
        multiplied = k / PRODUCT_K * products * self._consumers * (PRODUCT_CYCLES + COLUMN_CYCLES * self.columns)
        gathered = (self.tile + self.index.reach) * self.channels / GATHERED
        return START + waves * (EPILOGUE_CYCLES * self.tile + self.channel_blocks * max(multiplied, gathered))

    def supported(self) -> bool:
        fits = self.channels > 0 and self.filter_blocks <= MAX_FILTER_BLOCKS
        return fits and self.index.supported(self.target)

    def kernels(self) -> Sequence[CudaKernel]:
        """The launches: pack the weights, multiply."""
        chunks = self.filter_blocks * self._filters * self.products // CHUNK_ELEMENTS
        scratch, shared = self.scratch(), self.shared
        multiply = self.multiply(scratch)
        pack = replace(multiply, name="pack_weights", elements=chunks, blocks=None, threads=None, shared=0)
        return [CudaKernel((replace(pack, layouts=(scratch, shared)), multiply), scratch)]

    def multiply(self, scratch: MemoryLayout, fallback: bool = False) -> CudaLaunch:
        """The launch that multiplies; with ``fallback`` it computes only the tiles that an fp16x2 launch has marked."""
        macros = {
            **self.macros(),
            "WEIGHT_STAGES": self._weight_stages(self.channels),
            "WARPGROUP_COLUMNS": self.columns,
            "TILES_PER_IMAGE": self.image_tiles,
            "POOLING": int(self.pooled),
            "PRODUCER_THREADS": self._producers,
            "CONSUMER_WARPGROUPS": self._consumers,
            **({"FALLBACK": 1} if fallback else {}),
        }
        return CudaLaunch(
            FILE,
            "conv_shifted_bf16x3",
            self.index.problem.images[:1],
            (self.index.problem.dtype,),
            blocks=min(self.tiles, self.target.multiprocessors),
            threads=self._producers + self._consumers * WARPGROUP,
            shared=self.shared,
            definitions=macros,
            layouts=(scratch,),
        )

    def macros(self) -> Mapping[str, int]:
        """The macros of all kernels of a convolution."""
        return {
            **self.index.macros(),
            "STAGE_CHANNELS": self.channels,
            "WIDE_C": math.gcd(2, self.index.problem.outputs[3]),
            "FLIPPED": int(self.flipped),
        }
