"""Weight gradients of stride-1 convolutions with 3 x 3 windows on Hopper, operands as bf16x3. The output gradient is
dense, or a pooled gradient as a 2:4 sparse operand (`kernels/cuda/conv/shifted_weight_grad.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from adtrain.core.kernel import Arrays, CudaKernel, CudaLaunch, MemoryLayout, Target, lengths, memory_layout
from adtrain.lowering.cuda.conv.problem import PaddedIndex
from adtrain.lowering.cuda.conv.shifted import (
    ALIGNED,
    BF16X3_TERMS,
    FILTERS,
    LOADER_BYTES,
    PRODUCTS,
    START,
    STATIC_SHARED,
)

THREADS, LOADERS, SUM_THREADS = 640, 256, 256
"""Threads of a block; those that load; threads of a block that sums splits."""
CHANNELS, STAGE_POSITIONS = 32, (128, 64)
"""Channels of a block; positions of a stage, the faster choice first."""
MULTIPLY_ADDS, SPARSE_MULTIPLY_ADDS = 1400, 1600
"""bfloat16 multiply-adds of a multiprocessor per cycle, measured: dense gradients; pooled ones, zeros included."""
EPILOGUE_CYCLES, SECOND_PASS = 3500, 4000
"""Cycles of a block's epilogue; cycles of the sum over splits."""
IMAGE_EPILOGUE_CYCLES = 35_000
"""Cycles of a block's epilogue that writes the gradient of an image, measured: neighbours in memory are in several
threads."""
ONES_BYTES = 512
"""Bytes of shared memory for the ones that a bias gradient multiplies by."""
SUM_SHARES, MIN_SHARE = (8, 4, 2, 1), 4
"""Choices for the number of threads that sum an element; minimum of splits of each thread."""


@dataclass(frozen=True)
class ShiftedWeightGrad:
    """The weight gradient.

    Attributes:
        image_stages: stages of one image, if each image starts with a stage; 0 if stages cover the flat index without
            gaps.
        pooled: whether the output gradient comes from a 2 x 2 max pooling.
        bias: whether the bias gradient is computed too; only for a pooled gradient.
        by_image: whether the gradient of each image is computed, in place of their sum. A split is an image.
        norms: whether only the squared norms of these are computed.
    """

    index: PaddedIndex
    target: Target
    image_stages: int = 0
    pooled: bool = False
    bias: bool = False
    by_image: bool = False
    norms: bool = False

    def _image_rows(self, positions: int) -> int:
        """Rows of the images in a stage."""
        return -(-(positions + self.index.reach) // 8) * 8

    def _shared(self, positions: int) -> MemoryLayout:
        """The layout of shared memory for stages of this number of positions."""
        gradients = FILTERS * (positions // 2 if self.pooled else positions)
        selectors = gradients // 8 if self.pooled else 0
        stage = BF16X3_TERMS * 2 * (self._image_rows(positions) * CHANNELS + gradients) + selectors
        loads = LOADER_BYTES * LOADERS // 4
        arrays = {"STAGES": (-(-stage // 1024) * 1024, 2), "LOADS": (4, loads), "ONES": (ONES_BYTES, int(self.bias))}
        return memory_layout("SHARED", arrays, alignment=1024)

    @cached_property
    def stage(self) -> int:
        """Positions of a stage; 0 if no choice fits into shared memory. Whole stages cover an image."""
        _, _, rows, columns = self.index.problem.outputs
        covered = (rows - 1) * self.index.pitch + columns if self.by_image else 0
        max_rows = LOADERS if self.pooled else math.inf  # a row for each thread
        capacity = self.target.shared - STATIC_SHARED
        fits = (n for n in STAGE_POSITIONS if self._shared(n) <= capacity and self._image_rows(n) <= max_rows)
        return min(fits, key=lambda n: -(-covered // n) * n, default=0)

    @cached_property
    def blocks(self) -> int:
        """Blocks of the same positions."""
        return -(-self.index.problem.outputs[1] // FILTERS) * -(-self.index.problem.images[1] // CHANNELS)

    @cached_property
    def stages(self) -> int:
        """Stages of all images."""
        return self.image_stages * self.index.problem.images[0] or -(-self.index.count // self.stage)

    def best(self) -> ShiftedWeightGrad | None:
        """The fastest supported choice of stages by estimate."""
        return min((g for g in self.choices() if g.supported()), key=lambda g: g.cycles, default=None)

    def choices(self) -> Iterator[ShiftedWeightGrad]:
        """This gradient without gaps between stages, and with a stage at the start of each image."""
        _, _, rows, columns = self.index.problem.outputs
        gapless = replace(self, index=self._even_rows(self.index, columns // 2))
        if not self.by_image:
            yield gapless
        if self.stage:
            index, count = gapless.index.tiled_by_image(self.stage, rows // 2 * 2 if self.pooled else rows)
            yield replace(self, index=self._even_rows(index), image_stages=count)

    def _even_rows(self, index: PaddedIndex, min_pairs: int = 0) -> PaddedIndex:
        return index.with_even_rows(min_pairs) if self.pooled else index

    def _cycles(self, splits: int) -> float:
        waves = -(-self.blocks * splits // self.target.multiprocessors)
        speed = SPARSE_MULTIPLY_ADDS if self.pooled else MULTIPLY_ADDS
        count = PRODUCTS[self.index.bf16_terms]
        products = FILTERS * CHANNELS * self.index.problem.taps * self.stage * count / speed
        epilogue = IMAGE_EPILOGUE_CYCLES if self.by_image and not self.norms else EPILOGUE_CYCLES
        multiplied = waves * (epilogue + -(-self.stages // splits) * products)
        return START + multiplied + (SECOND_PASS if self._in_scratch(splits) else 0)

    def _in_scratch(self, splits: int) -> bool:
        """Whether a second launch adds the sums of blocks."""
        return self.blocks > 1 if self.norms else splits > 1 and not self.by_image

    @cached_property
    def splits(self) -> int:
        """Splits of the positions among blocks."""
        if self.by_image:
            return self.index.problem.images[0]
        return min(range(1, min(self.stages, 2 * self.target.multiprocessors) + 1), key=self._cycles)

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        return self._cycles(self.splits)

    def supported(self) -> bool:
        problem = self.index.problem
        fits = problem.kernel == (3, 3) and (not self.pooled or problem.dilation == (1, 1)) and self.stage > 0
        return fits and self.index.supported(self.target)

    def kernels(self) -> Sequence[CudaKernel]:
        """The sums of each split, and their sum unless they are the gradients of images."""
        return [self.split_into(self.splits)]

    def split_into(self, splits: int, of_fp16x2: MemoryLayout | None = None) -> CudaKernel:
        """The launches with this number of splits.

        Args:
            of_fp16x2: the scratch of an fp16x2 launch. Then splits are of whole images, and only those that the launch
                has marked are computed.
        """
        problem = self.index.problem
        in_scratch = self._in_scratch(splits) or of_fp16x2 is not None or self.bias
        shares = next(count for count in SUM_SHARES if splits >= MIN_SHARE * count or count == 1)
        macros = {
            **self.index.macros(),
            "STAGE_CHANNELS": CHANNELS,
            "STAGE_POSITIONS": self.stage,
            "STAGES_PER_IMAGE": self.image_stages,
            "SPLIT": int(in_scratch),
            "FALLBACK": int(of_fp16x2 is not None),
            "BIAS": int(self.bias),
            "SUM_SHARES": shares,
            **({"NORMS": 1} if self.norms else {}),
        }
        filters, shared = problem.outputs[1] if self.bias else 0, self._shared(self.stage)
        scratch = self.scratch(splits) if of_fp16x2 is None else of_fp16x2
        dense = "conv/shifted_weight_grad_bf16x3.cu", "weight_grad_shifted_bf16x3"
        sparse = "conv/sparse_pool_weight_grad.cu", "weight_grad_sparse_pool"
        file, name = sparse if self.pooled else dense
        multiply = CudaLaunch(
            file,
            name,
            (problem.images[0], splits),
            (problem.dtype,),
            blocks=(self.blocks, splits),
            threads=THREADS,
            shared=shared,
            definitions=macros,
            layouts=(scratch,),
        )
        if not in_scratch:
            return CudaKernel((multiply,))
        sums = splits if self.norms else (problem.weights + filters) * shares
        blocks = -(-sums // SUM_THREADS)
        add = replace(multiply, name="sum_weight_grad_splits", blocks=blocks, threads=SUM_THREADS, shared=0)
        add = replace(add, layouts=(shared, scratch))
        return CudaKernel((multiply, add), scratch)

    def scratch(self, splits: int, packed: int | None = None) -> MemoryLayout:
        """The layout of scratch: the sums of each split; of an fp16x2 launch also marks and packed operands."""
        filters = self.index.problem.outputs[1] if self.bias else 0
        marks = 0 if packed is None else self.blocks * self.index.problem.kernel[0]
        (count,) = lengths(splits=splits)
        of_split = self.blocks if self.norms else self.index.problem.weights + BF16X3_TERMS * filters
        arrays: Arrays = {
            "SUMS": (4, (count * of_split).rounded_up(ALIGNED)),
            "FALLS_BACK": (4, (count * marks).rounded_up(ALIGNED)),
            "PACKED": (1, packed or 0),
        }
        return memory_layout("SCRATCH", arrays, count)
