"""Gradients of convolutions with stride 1 by their weights on Hopper's matrix units, in halves where they hold float32
(`kernels/cuda/conv/shifted_weight_grad_fp16x2.cu`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel
from adtrain.lowering.cuda.conv.packed_images import ALIGNED, LAYING, LAYING_BLOCKS, LINE, Laid
from adtrain.lowering.cuda.conv.padded_index import Positions
from adtrain.lowering.cuda.conv.shifted import FILTERS, REST, SHARED, START, TILE_END
from adtrain.lowering.cuda.conv.shifted_weight_grad import CHANNELS, SECOND_PASS, PlaneWeightGrad

THREADS, STEP, STAGE = 512, 16, 128
"""Of a block; positions of an instruction, and of a stage."""
STAGES = 2, 4
"""How many stages there are in shared memory, at least and at most."""
CYCLE = {2: 1500, 1: 1150}
"""Multiply-adds of float16 that a multiprocessor does in a cycle, of so many numbers an operand, measured."""


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
        return LINE * self.positions.numbers * (self._image_lines + 2 * (STAGE + 8))

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
    def _laid(self) -> tuple[Laid, Laid]:
        """Images and gradients."""
        return Laid(self.positions), Laid(self.positions.turned())

    @property
    def scratch(self) -> int:
        """Bytes: of `Scratch` and `Operands` of the kernels."""
        parts = self._splits * (PlaneWeightGrad(self.positions).size * 4 + self._blocks * self.positions.kernel[0] * 4)
        return parts + sum(ALIGNED + laid.bytes for laid in self._laid)

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        each = (3 if self.positions.numbers == 2 else 1) / CYCLE[self.positions.numbers]
        products = FILTERS * CHANNELS * math.prod(self.positions.kernel) * self._steps * STEP * each
        rounds = -(-self._blocks * self._splits // CHIP.multiprocessors)
        multiplied = rounds * (TILE_END + -(-self.positions.images[0] // self._splits) * products)
        before = 3 * REST + sum(laid.cycles for laid in self._laid)
        return START + before + multiplied + SECOND_PASS

    def suits(self) -> bool:
        """Whether the kernels are right for it, on the GPU at hand."""
        room = self._stages >= STAGES[0] and self._steps * STEP <= self.positions.image
        return PlaneWeightGrad(self.positions).suits() and self.positions.turned().suits() and room

    def kernel(self) -> LegacyKernel:
        """The launches: the operands in halves, what these hold of the products, the rest in pieces, and the sum."""
        rest = PlaneWeightGrad(self.positions).in_parts(self._splits, rest=True)
        shared = self._stages * self._stage_bytes + 1024
        multiply = self._step("conv_halves_weight_grad", (self._blocks, self._splits), THREADS, rest, shared)
        prepare = self._step("prepare_operands", LAYING_BLOCKS * CHIP.multiprocessors, LAYING, multiply)
        return self._step("begin_operands", CHIP.multiprocessors, LAYING, prepare)

    def _step(
        self, name: str, blocks: int | tuple[int, int], threads: int, then: LegacyKernel, shared: int = 0
    ) -> LegacyKernel:
        images = self.positions.images[0]
        definitions: Mapping[str, int] = {
            **self.positions.definitions,
            "CHANNELS": CHANNELS,
            "HALVES_STAGES": self._stages,
        }
        return LegacyKernel(
            "conv/shifted_weight_grad_fp16x2.cu",
            name,
            lambda *_, **__: (images, self._splits),
            blocks=lambda *_, **__: blocks,
            threads=lambda *_, **__: threads,
            shared=lambda *_, **__: shared,
            definitions=lambda *_, **__: definitions,
            scratch=lambda *_, **__: self.scratch,
            then=then,
        )
