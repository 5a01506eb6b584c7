"""Gradients of convolutions with stride 1 by their weights on Hopper's matrix units, float32 in three pieces
(`kernels/cuda/conv_planes_weight_grad.cu`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.kernel import CudaKernel, no_bytes
from adtrain.ops.planes_cuda import FILTERS, PASSING, PIECES, SHARED, START, TILE_END
from adtrain.ops.positions import Positions

THREADS, GATHERERS, SUMMING = 640, 256, 256
"""Of a block, and those that gather; of the sum of the parts."""
CHANNELS, POSITIONS = 32, (128, 64)
"""Channels that a block takes; how many positions may be in a stage, the faster choice first."""
CYCLE = 1400
"""Multiply-adds of bfloat16 that a multiprocessor does in a cycle, measured."""
SECOND_PASS = 4000
"""Cycles of the sum of the parts."""


@dataclass(frozen=True)
class PlaneWeightGrad:
    """The gradient of a convolution by its weights.

    Attributes:
        of_image: the stages that each image has, `positions` being spread so that images are as far apart; 0 where
            stages run on from image to image.
    """

    positions: Positions
    of_image: int = 0

    def _shared(self, count: int) -> int:
        lines = -(-(count + self.positions.reach) // 8) * 8
        stage = PIECES * 2 * (lines * CHANNELS + count * FILTERS)
        return 2 * -(-stage // 1024) * 1024 + PASSING * GATHERERS + 1024

    @property
    def step(self) -> int:
        """Positions of a stage; 0 where not even the fewest fit."""
        return next((count for count in POSITIONS if self._shared(count) <= SHARED), 0)

    @property
    def blocks(self) -> int:
        """Blocks that take the same positions."""
        return -(-self.positions.outputs[1] // FILTERS) * -(-self.positions.images[1] // CHANNELS)

    @property
    def size(self) -> int:
        """Of the gradient."""
        return self.positions.outputs[1] * self.positions.images[1] * math.prod(self.positions.kernel)

    @property
    def steps(self) -> int:
        """Stages of all images."""
        return self.of_image * self.positions.images[0] or -(-self.positions.count // self.step)

    def fitted(self) -> PlaneWeightGrad | None:
        """It with the stages that should be the fastest, if any suit."""
        return min((g for g in self.choices() if g.suits()), key=lambda g: g.cycles, default=None)

    def choices(self) -> Iterator[PlaneWeightGrad]:
        """It with stages that run on, and with those that begin with each image."""
        yield self
        if self.step:
            positions, count = self.positions.by_image(self.step, self.positions.outputs[2])
            yield replace(self, positions=positions, of_image=count)

    def _cycles(self, splits: int) -> float:
        rounds = -(-self.blocks * splits // CHIP.multiprocessors)
        products = FILTERS * CHANNELS * math.prod(self.positions.kernel) * self.step * 6 / CYCLE
        return START + rounds * (TILE_END + -(-self.steps // splits) * products) + (SECOND_PASS if splits > 1 else 0)

    @property
    def splits(self) -> int:
        """Into how many parts the positions are cut."""
        return min(range(1, min(self.steps, 2 * CHIP.multiprocessors) + 1), key=self._cycles)

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        return self._cycles(self.splits)

    def suits(self) -> bool:
        """Whether the kernels are right for it, on the GPU at hand."""
        return self.positions.suits() and self.positions.kernel == (3, 3) and self.step > 0

    def kernel(self) -> CudaKernel:
        """The launches: the products of each part, and their sum."""
        return self.in_parts(self.splits)

    def in_parts(self, splits: int, rest: bool = False) -> CudaKernel:
        """The same of so many parts.

        Args:
            rest: parts are images, and the launches are behind those of `conv_halves_weight_grad.cu`.
        """
        definitions = {
            **self.positions.definitions,
            "CHANNELS": CHANNELS,
            "POSITIONS": self.step,
            "OF_IMAGE": self.of_image,
            "SPLIT": int(splits > 1 or rest),
            "REST": int(rest),
        }
        whole = CudaKernel(
            "conv_planes_weight_grad.cu",
            "conv_planes_weight_grad",
            lambda *_, **__: (self.positions.images[0], splits),
            blocks=lambda *_, **__: (self.blocks, splits),
            threads=lambda *_, **__: THREADS,
            shared=lambda *_, **__: self._shared(self.step),
            definitions=lambda *_, **__: definitions,
        )
        if splits == 1 and not rest:
            return whole
        split = replace(whole, scratch=lambda *_, **__: splits * self.size * 4)
        add = replace(
            split,
            name="sum_parts",
            blocks=lambda *_, **__: -(-self.size // 32),
            threads=lambda *_, **__: SUMMING,
            shared=no_bytes,
        )
        return replace(split, then=add)
