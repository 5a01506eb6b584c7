"""Gradients of convolutions with stride 1 by their weights on Hopper's matrix units, in halves where they hold float32
(`kernels/cuda/conv_halves_weight_grad.cu`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from adtrain.core.chip import CHIP
from adtrain.core.kernel import CudaKernel
from adtrain.ops.planes_cuda import (
    FILTERS,
    HALVES,
    KNOWN,
    LAID,
    LAYING,
    LINE,
    MEASURED,
    MOVED,
    REST,
    SHARED,
    START,
    TILE_END,
    Positions,
    measuring,
)
from adtrain.ops.planes_weight_grad_cuda import CHANNELS, SECOND_PASS, PlaneWeightGrad

THREADS, STEP, STAGE = 512, 16, 128
"""Of a block; positions of an instruction, and of a stage."""
STAGES = 2, 4
"""How many stages there are in shared memory, at least and at most."""
CYCLE = 1500
"""Multiply-adds of float16 that a multiprocessor does in a cycle."""


@dataclass(frozen=True)
class HalvesWeightGrad:
    """The gradient of a convolution by its weights."""

    positions: Positions

    @property
    def _image_lines(self) -> int:
        """Of a stage."""
        return (7 + STAGE + self.positions.reach + 7) // 8 * 8

    @property
    def _stage_bytes(self) -> int:
        return LINE * (HALVES * self._image_lines + 2 * HALVES * (STAGE + 8))

    @property
    def _stages(self) -> int:
        return min((SHARED - 1024) // self._stage_bytes, STAGES[1])

    @property
    def _steps(self) -> int:
        """Of an image, from its first output to its last."""
        _, _, rows, columns = self.positions.outputs
        return -(-((rows - 1) * self.positions.pitch + columns) // STEP)

    @property
    def _blocks(self) -> int:
        """That take the same images."""
        return -(-self.positions.outputs[1] // FILTERS) * -(-self.positions.images[1] // CHANNELS)

    @property
    def _splits(self) -> int:
        """Into how many parts the images are cut."""
        return max(1, min(CHIP.multiprocessors // self._blocks, self.positions.images[0]))

    @property
    def _chunks(self) -> tuple[int, int]:
        """Of 32 channels; of as many filters, an even number."""
        return -(-self.positions.images[1] // CHANNELS), -(-self.positions.outputs[1] // FILTERS) * 2

    @property
    def _lines(self) -> int:
        """Of a chunk."""
        passes = -(-self._steps * STEP // STAGE)
        count = (self.positions.images[0] - 1) * self.positions.image + passes * STAGE + self._image_lines
        return -(-count // LAID) * LAID

    @property
    def scratch(self) -> int:
        """Bytes: `Scratch` of the kernels."""
        parts = self._splits * (PlaneWeightGrad(self.positions).size * 4 + self._blocks * self.positions.kernel[0] * 4)
        laid = sum(self._chunks) * self._lines * (HALVES * LINE + 4)
        return parts + 2 * self.positions.images[0] * KNOWN + 16 + 2 * 1024 + laid

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        images, outputs = self.positions.images, self.positions.outputs
        moved = 4 * (math.prod(images) + math.prod(outputs))
        laid = sum(self._chunks) * self._lines * 4 * LINE
        products = FILTERS * CHANNELS * math.prod(self.positions.kernel) * self._steps * STEP * 3 / CYCLE
        rounds = -(-self._blocks * self._splits // CHIP.multiprocessors)
        multiplied = rounds * (TILE_END + -(-images[0] // self._splits) * products)
        return START + 3 * REST + moved / MEASURED + laid / MOVED + multiplied + SECOND_PASS

    def suits(self) -> bool:
        """Whether the kernels are right for it, on the GPU at hand."""
        room = self._stages >= STAGES[0] and self._steps * STEP <= self.positions.image
        return PlaneWeightGrad(self.positions).suits() and room and self._lines < 1 << 31

    def kernel(self) -> CudaKernel:
        """The launches: what halves hold, the operands in halves, their products, the rest in pieces, and the sum."""
        images, grid = self.positions.images[0], (self._lines // LAID, sum(self._chunks))
        rest = PlaneWeightGrad(self.positions).in_parts(self._splits, rest=True)
        shared = self._stages * self._stage_bytes + 1024
        multiply = self._step("conv_halves_weight_grad", (self._blocks, self._splits), THREADS, rest, shared)
        lay = self._step("lay_operands", grid, LAYING, multiply)
        return self._step("measure_operands", 2 * images, measuring(images), lay)

    def _step(
        self, name: str, blocks: int | tuple[int, int], threads: int, then: CudaKernel, shared: int = 0
    ) -> CudaKernel:
        images = self.positions.images[0]
        own = {"CHANNELS": CHANNELS, "HALVES_STAGES": self._stages, "MEASURING": measuring(images)}
        definitions: Mapping[str, int] = {**self.positions.definitions, **own}
        return CudaKernel(
            "conv_halves_weight_grad.cu",
            name,
            lambda *_, **__: (images, self._splits),
            blocks=lambda *_, **__: blocks,
            threads=lambda *_, **__: threads,
            shared=lambda *_, **__: shared,
            definitions=lambda *_, **__: definitions,
            scratch=lambda *_, **__: self.scratch,
            then=then,
        )
