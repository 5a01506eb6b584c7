"""Weight gradients of stride-1 convolutions with 3 x 3 windows on Hopper, operands as fp16x2
(`kernels/cuda/conv/shifted_weight_grad_fp16x2.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.memory_layout import MemoryLayout, memory_layout
from adtrain.core.target import Target
from adtrain.lowering.cuda.conv.padded_index import PaddedIndex
from adtrain.lowering.cuda.conv.shifted import FILTERS, START, STATIC_SHARED
from adtrain.lowering.cuda.conv.shifted_fp16x2 import (
    LAUNCH_CYCLES,
    PACK_BLOCKS,
    PACK_THREADS,
    PACKED_MACROS,
    ROW_BYTES,
    PackedImages,
)
from adtrain.lowering.cuda.conv.shifted_weight_grad import (
    CHANNELS,
    EPILOGUE_CYCLES,
    SECOND_PASS,
    ShiftedWeightGrad,
)

FILE = "conv/shifted_weight_grad_fp16x2.cu"
THREADS, STEP, STAGE = 512, 16, 128
"""Threads of a block; positions of one wgmma; positions of a stage."""
MIN_STAGES, MAX_STAGES = 2, 4
MULTIPLY_ADDS = {2: 1500, 1: 1150}
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
        count = (3 if terms == 2 else 1) / MULTIPLY_ADDS[terms]
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
        fallback = self._fallback.split_into(self._splits, self._scratch)
        multiprocessors = self.target.multiprocessors
        launches = (
            self._launch("measure_operands", PACK_BLOCKS * multiprocessors, PACK_THREADS),
            self._launch("pack_operands", PACK_BLOCKS * multiprocessors, PACK_THREADS),
            self._launch("weight_grad_shifted_fp16x2", (self._fallback.blocks, self._splits), THREADS, self._shared),
            *fallback.launches,
        )
        return [CudaKernel(launches, self._scratch)]

    def _launch(self, name: str, blocks: int | tuple[int, int], threads: int, shared: int = 0) -> CudaLaunch:
        problem = self.index.problem
        numbers, types = (problem.images[0], self._splits), (problem.dtype,)
        stages = {"STAGE_CHANNELS": CHANNELS, "PIPELINE_STAGES": self._stages}
        macros = {**self.index.macros(), **PACKED_MACROS, **stages}
        made = CudaLaunch(FILE, name, numbers, types, blocks=blocks, threads=threads, shared=shared, definitions=macros)
        return replace(made, layouts=(self._scratch, self._packed[0].layout, *([] if shared else [self._shared])))
