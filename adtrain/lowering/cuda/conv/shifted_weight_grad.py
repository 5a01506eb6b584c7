"""Gradients of convolutions with stride 1 by their weights on Hopper's matrix units, float32 in three pieces
(`kernels/cuda/conv/shifted_weight_grad.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel, no_bytes
from adtrain.lowering.cuda.conv.padded_index import Positions
from adtrain.lowering.cuda.conv.shifted import FILTERS, PASSING, PIECES, PRODUCTS, SHARED, START, TILE_END

THREADS, GATHERERS, SUMMING = 640, 256, 256
"""Of a block, and those that gather; of the sum of the parts."""
CHANNELS, POSITIONS = 32, (128, 64)
"""Channels that a block takes; how many positions may be in a stage, the faster choice first."""
CYCLE, POOLED_CYCLE = 1400, 1600
"""Multiply-adds of bfloat16 that a multiprocessor does in a cycle, measured; of a pooled gradient, zeros counted."""
ONES = 512
"""Bytes of shared memory that the gradient by a bias takes."""
SECOND_PASS = 4000
"""Cycles of the sum of the parts."""
SHARES, EACH = (8, 4, 2, 1), 4
"""Threads that may sum the parts of an element, the most first; and the parts that each of several must have."""


@dataclass(frozen=True)
class PlaneWeightGrad:
    """The gradient of a convolution by its weights.

    Attributes:
        of_image: the stages that each image has, `positions` being spread so that images are as far apart; 0 where
            stages run on from image to image.
        pooled: whether the gradient of the outputs is that behind a max pooling of windows of 2 x 2.
        bias: whether the gradient by the convolution's bias is computed, too, of a pooled one.
    """

    positions: Positions
    of_image: int = 0
    pooled: bool = False
    bias: bool = False

    def _lines(self, count: int) -> int:
        """Of the images of a stage."""
        return -(-(count + self.positions.reach) // 8) * 8

    def _shared(self, count: int) -> int:
        numbers = FILTERS * (count // 2 if self.pooled else count)
        bits = numbers // 8 if self.pooled else 0
        stage = PIECES * 2 * (self._lines(count) * CHANNELS + numbers) + bits
        return 2 * -(-stage // 1024) * 1024 + PASSING * GATHERERS + 1024 + (ONES if self.bias else 0)

    @property
    def step(self) -> int:
        """Positions of a stage; 0 where not even the fewest fit."""
        most = GATHERERS if self.pooled else math.inf  # a line for each thread
        return next((n for n in POSITIONS if self._shared(n) <= SHARED and self._lines(n) <= most), 0)

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
        _, _, rows, columns = self.positions.outputs
        run_on = replace(self, positions=self._whole(self.positions, columns // 2))
        yield run_on
        if self.step:
            positions, count = run_on.positions.by_image(self.step, rows // 2 * 2 if self.pooled else rows)
            yield replace(self, positions=self._whole(positions), of_image=count)

    def _whole(self, positions: Positions, pairs: int = 0) -> Positions:
        return positions.of_whole_windows(pairs) if self.pooled else positions

    def _cycles(self, splits: int) -> float:
        rounds = -(-self.blocks * splits // CHIP.multiprocessors)
        cycle = POOLED_CYCLE if self.pooled else CYCLE
        each = PRODUCTS[self.positions.pieces]
        products = FILTERS * CHANNELS * math.prod(self.positions.kernel) * self.step * each / cycle
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
        plain = not self.pooled or self.positions.dilation == (1, 1)
        return self.positions.suits() and self.positions.kernel == (3, 3) and plain and self.step > 0

    def kernel(self) -> LegacyKernel:
        """The launches: the products of each part, and their sum."""
        return self.in_parts(self.splits)

    def in_parts(self, splits: int, rest: bool = False) -> LegacyKernel:
        """The same of so many parts.

        Args:
            rest: parts are images, and the launches are behind those of `conv/shifted_weight_grad_fp16x2.cu`.
        """
        in_scratch = splits > 1 or rest or self.bias
        shares = next(count for count in SHARES if splits >= EACH * count or count == 1)
        definitions = {
            **self.positions.definitions,
            "CHANNELS": CHANNELS,
            "POSITIONS": self.step,
            "OF_IMAGE": self.of_image,
            "SPLIT": int(in_scratch),
            "REST": int(rest),
            "BIAS": int(self.bias),
            "SHARES": shares,
        }
        filters = self.positions.outputs[1] if self.bias else 0
        name = "conv_pooled_weight_grad" if self.pooled else "conv_planes_weight_grad"
        whole = LegacyKernel(
            "conv/sparse_pool_weight_grad.cu" if self.pooled else "conv/shifted_weight_grad_bf16x3.cu",
            name,
            lambda *_, **__: (self.positions.images[0], splits),
            blocks=lambda *_, **__: (self.blocks, splits),
            threads=lambda *_, **__: THREADS,
            shared=lambda *_, **__: self._shared(self.step),
            definitions=lambda *_, **__: definitions,
        )
        if not in_scratch:
            return whole
        split = replace(whole, scratch=lambda *_, **__: splits * (self.size + PIECES * filters) * 4)
        add = replace(
            split,
            name="sum_parts",
            blocks=lambda *_, **__: -(-(self.size + filters) * shares // SUMMING),
            threads=lambda *_, **__: SUMMING,
            shared=no_bytes,
        )
        return replace(split, then=add)
