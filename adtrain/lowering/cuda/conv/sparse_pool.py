"""Gradients of convolutions by their images behind a max pooling on Hopper's matrix units, which take the gradient for
the sparse matrix that it is (`kernels/cuda/conv/sparse_pool.cuh`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel, no_bytes
from adtrain.lowering.cuda.conv.padded_index import Positions
from adtrain.lowering.cuda.conv.shifted import GROUP, IMAGE_STAGES, MOST_STAGES, PIECES, SHARED, START, WORD

LINES, OUTS, CHANNELS = 128, 32, 32
"""Lines and channels of the images of a tile; filters of a stage."""
THREADS, CODE = 512, 2
"""Of a block; bytes that say of a line which positions GROUP filters are."""
LEAST_STAGES = 3
"""Of weights."""
PRODUCTS, SINGLE = 1420, 1600
"""Cycles of a tile's products with the weights of a stage, measured; where outputs are written one by one."""
SHARE = {3: 1.0, 2: 0.86, 1: 0.57}
"""Of these cycles, what numbers in so many pieces take, measured."""


@dataclass(frozen=True)
class PooledInputGrad:
    """The gradient by the images.

    Attributes:
        turned: the convolution of the gradient with the weights turned round.
    """

    turned: Positions

    @property
    def positions(self) -> Positions:
        """It, with zeros where lines of a row are needed that it has not."""
        padding, columns = self.turned.padding[1], self.turned.images[3]
        odd = padding % 2
        back, last = (padding + odd) // 2, (self.turned.outputs[3] - 1 + odd) // 2
        return self.turned.of_whole_windows(max(columns // 2 + back, last + 1 + self.turned.kernel[1] // 2 - back))

    @property
    def _matrices(self) -> int:
        """Of weights, of a chunk of filters."""
        rows, columns = self.turned.kernel
        return rows * (columns // 2 + 1)

    @property
    def _wide(self) -> int:
        """Neighbouring outputs that are written at once."""
        return 1 if self.turned.padding[1] % 2 else math.gcd(2, self.turned.outputs[3])

    @property
    def _chunks(self) -> int:
        return -(-self.turned.images[1] // CHANNELS)

    @property
    def _blocks(self) -> int:
        """Tiles of the same lines."""
        return -(-self.turned.outputs[1] // OUTS)

    @property
    def _words(self) -> int:
        """Of a stage of weights, of each piece."""
        return 2 * CHANNELS // GROUP * 2 * OUTS

    @property
    def _gradient_bytes(self) -> int:
        """Of the stages of the gradient."""
        rows, columns = self.turned.kernel
        lines = -(-(LINES + (rows - 1) * self.positions.pitch // 2 + columns // 2) // 8) * 8
        return IMAGE_STAGES * lines * CHANNELS // GROUP * (PIECES * WORD + CODE)

    @property
    def _stages(self) -> int:
        """Of weights."""
        return min((SHARED - 128 - self._gradient_bytes) // (PIECES * self._words * WORD), MOST_STAGES)

    @property
    def _tiles(self) -> int:
        return -(-self.positions.count // 2 // LINES) * self._blocks

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        rounds = -(-self._tiles // CHIP.multiprocessors)
        cycles = (PRODUCTS if self._wide == 2 else SINGLE) * SHARE[self.positions.pieces]
        return START + rounds * self._chunks * self._matrices * cycles

    def suits(self) -> bool:
        """Whether the kernels are right for it, on the GPU at hand."""
        return self.positions.suits() and self.turned.dilation == (1, 1) and self._stages >= LEAST_STAGES

    def kernel(self) -> LegacyKernel:
        """The launches: weights to pieces, then the products."""
        words = self._blocks * self._chunks * self._matrices * self._words
        weights = PIECES * self._words * WORD
        definitions = {
            **self.positions.definitions,
            "CHANNELS": CHANNELS,
            "TILE_STAGES": self._stages,
            "WIDE_C": self._wide,
            "TURNED": 1,
        }
        multiply = LegacyKernel(
            "conv/sparse_pool_input_grad.cu",
            "conv_pooled_input_grad",
            lambda *_, **__: self.turned.images[:1],
            blocks=lambda *_, **__: min(self._tiles, CHIP.multiprocessors),
            threads=lambda *_, **__: THREADS,
            shared=lambda *_, **__: 128 + self._gradient_bytes + self._stages * weights,
            definitions=lambda *_, **__: definitions,
            scratch=lambda *_, **__: words * PIECES * WORD,
        )
        cut = replace(multiply, name="cut_weights", blocks=None, elements=lambda *_, **__: words, threads=None)
        return replace(cut, shared=no_bytes, then=multiply)
