"""Convolutions with stride 1 on Hopper's matrix units, float32 in three pieces (`kernels/cuda/planes.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.kernel import CudaKernel, no_bytes

CAPABILITY = (9, 0)
"""The compute capability whose instructions the kernels consist of."""
PIECES, GROUP, WORD = 3, 8, 16
"""Pieces of a float32; channels of a plane, and the bytes of a position in it."""
FILTERS, TILE = 64, 256
"""Filters of a tile, and positions of one of `conv_planes.cu`, which stacks the pieces of half as many filters."""
THREADS, SUMMING = (384, 640), 256
"""Of a block of `conv_planes.cu`, and of `conv_planes_weight_grad.cu`; of the sum of its parts."""
IMAGE_STAGES, LEAST_STAGES, MOST_STAGES = 2, 3, 8
"""Stages of images in shared memory, and least and most of weights."""
CHANNELS, WEIGHT_GRAD_CHANNELS = (32, 16), 32
"""How many may be in a stage of `conv_planes.cu`, the faster choice first; how many a block of the other takes."""
WEIGHT_GRAD_POSITIONS = (128, 64)
"""How many may be in a stage of `conv_planes_weight_grad.cu`, the faster choice first."""
SHARED = 226 << 10
"""Bytes of shared memory that a block can have, beside what it has of its own."""
PASSING = 4 * GROUP * 4
"""Bytes that each gathering thread has of it for what it reads."""
GATHERERS = 96, 256
"""These threads, of both kernels."""
MOST_ELEMENTS = 1 << 31
"""Of an array, so that 32 bits count them."""
CYCLE, WEIGHT_GRAD_CYCLE = 1900, 1400
"""Multiply-adds of bfloat16 that a multiprocessor does in a cycle in each kernel, measured."""
GATHERED = 1.2
"""Elements of images that it brings into a stage in a cycle, measured."""
START, TILE_END, SECOND_PASS = 6000, 3500, 4000
"""Cycles of the launches, and until a block has its first stages; of a tile's end; of the sum of the parts."""


@dataclass(frozen=True)
class Positions:
    """A convolution with stride 1 and without groups.

    Attributes:
        images: (N, C, H, W) of what windows are taken of.
        outputs: (N, O, OH, OW).
        kernel, padding, dilation: of the window, rows and columns.
    """

    images: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def pitch(self) -> int:
        """Positions from a row to the next: even, so that two neighbours in memory are one access."""
        columns = max(self.images[3] + self.padding[1], self.outputs[3])
        return columns + columns % 2

    @property
    def image(self) -> int:
        """Positions from an image to the next."""
        return self.pitch * max(self.images[2] + self.padding[0], self.outputs[2])

    @property
    def count(self) -> int:
        return self.images[0] * self.image

    @property
    def reach(self) -> int:
        """Positions from the first to the last element of a window."""
        (rows, columns), (down, right) = self.kernel, self.dilation
        return (rows - 1) * down * self.pitch + (columns - 1) * right

    @property
    def definitions(self) -> Mapping[str, int]:
        pairs = (("KH", "KW"), self.kernel), (("PH", "PW"), self.padding), (("DH", "DW"), self.dilation)
        macros = {name: value for names, values in pairs for name, value in zip(names, values, strict=True)}
        names = ("IN_CHANNELS", "IN_ROWS", "IN_COLUMNS", "OUT_CHANNELS", "OUT_ROWS", "OUT_COLUMNS", "PITCH", "IMAGE")
        lengths = (*self.images[1:], *self.outputs[1:], self.pitch, self.image)
        return {**macros, **dict(zip(names, lengths, strict=True))}

    def turned(self) -> Positions:
        """The convolution of the outputs' gradients that is the gradient by the images."""
        reach = [(length - 1) * step for length, step in zip(self.kernel, self.dilation, strict=True)]
        padding = reach[0] - self.padding[0], reach[1] - self.padding[1]
        return replace(self, images=self.outputs, outputs=self.images, padding=padding)

    def suits(self) -> bool:
        """Whether positions are right for it, on the GPU at hand."""
        sizes = (*map(math.prod, (self.images, self.outputs)), self.count + self.reach + TILE)
        return CHIP.capability == CAPABILITY and min(self.padding) >= 0 and 0 < min(sizes) <= max(sizes) < MOST_ELEMENTS


@dataclass(frozen=True)
class PlaneConvolution:
    """A convolution, or its gradient by the images, which is one of the outputs' gradients, too.

    Attributes:
        turned: whether the weights are (C, O, KH, KW), and their elements in reverse order.
    """

    positions: Positions
    turned: bool

    @property
    def _stacked(self) -> bool:
        return self.positions.outputs[1] <= FILTERS // 2

    @property
    def _filters(self) -> int:
        """Of a tile."""
        return FILTERS // 2 if self._stacked else FILTERS

    @property
    def _blocks(self) -> int:
        """Tiles of the same positions."""
        return -(-self.positions.outputs[1] // self._filters)

    @property
    def _weight_pieces(self) -> int:
        return 2 if self._stacked else PIECES

    def _weight_bytes(self, channels: int) -> int:
        """Of a stage of weights."""
        return self._weight_pieces * channels * FILTERS * 2

    def _other_bytes(self, channels: int) -> int:
        """Of all else in shared memory, with what it takes to align it."""
        images = PIECES * channels // GROUP * (TILE + self.positions.reach) * WORD
        exchanged = TILE * FILTERS * 2 if self._stacked else 0
        return IMAGE_STAGES * images + PASSING * GATHERERS[0] + exchanged + 128

    def _stages(self, channels: int) -> int:
        return min((SHARED - self._other_bytes(channels)) // self._weight_bytes(channels), MOST_STAGES)

    @property
    def channels(self) -> int:
        """Channels of a stage; 0 where not even the fewest fit."""
        return next((count for count in CHANNELS if self._stages(count) >= LEAST_STAGES), 0)

    @property
    def stages(self) -> int:
        """Stages of weights."""
        return self._stages(self.channels)

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self._other_bytes(self.channels) + self.stages * self._weight_bytes(self.channels)

    @property
    def tiles(self) -> int:
        return -(-self.positions.count // TILE) * self._blocks

    @property
    def products(self) -> int:
        """Length of the sums, channels beyond the last one included."""
        chunks = -(-self.positions.images[1] // self.channels)
        return math.prod(self.positions.kernel) * chunks * self.channels

    @property
    def scratch(self) -> int:
        """Bytes: the weights in pieces."""
        return self._blocks * FILTERS * self.products * self._weight_pieces * 2

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        rounds, channels = -(-self.tiles // CHIP.multiprocessors), self.channels
        pairs = 4 if self._stacked else 6
        products = math.prod(self.positions.kernel) * channels * TILE * FILTERS * pairs / CYCLE
        stage = max(products, (TILE + self.positions.reach) * channels / GATHERED)
        return START + rounds * (TILE_END + -(-self.positions.images[1] // channels) * stage)

    def suits(self) -> bool:
        """Whether the kernels are right for it, on the GPU at hand."""
        return self.positions.suits() and self.channels > 0

    def kernel(self) -> CudaKernel:
        """The launches: weights to pieces, then the products."""
        definitions = {
            **self.positions.definitions,
            "CHANNELS": self.channels,
            "WIDE_C": math.gcd(2, self.positions.outputs[3]),
            "TURNED": int(self.turned),
            "TILE_STAGES": self.stages,
        }
        words = self._blocks * self._filters * self.products // GROUP
        multiply = CudaKernel(
            "conv_planes.cu",
            "conv_planes",
            lambda *_, **__: self.positions.images[:1],
            blocks=lambda *_, **__: min(self.tiles, CHIP.multiprocessors),
            threads=lambda *_, **__: THREADS[0],
            shared=lambda *_, **__: self.shared,
            definitions=lambda *_, **__: definitions,
            scratch=lambda *_, **__: self.scratch,
        )
        cut = replace(
            multiply, name="cut_weights", blocks=None, elements=lambda *_, **__: words, threads=None, shared=no_bytes
        )
        return replace(cut, then=multiply)


@dataclass(frozen=True)
class PlaneWeightGrad:
    """The gradient of a convolution by its weights."""

    positions: Positions

    def _shared(self, count: int) -> int:
        lines = -(-(count + self.positions.reach) // 8) * 8
        stage = PIECES * 2 * (lines * WEIGHT_GRAD_CHANNELS + count * FILTERS)
        return 2 * -(-stage // 1024) * 1024 + PASSING * GATHERERS[1] + 1024

    @property
    def step(self) -> int:
        """Positions of a stage; 0 where not even the fewest fit."""
        return next((count for count in WEIGHT_GRAD_POSITIONS if self._shared(count) <= SHARED), 0)

    @property
    def blocks(self) -> int:
        """Blocks that take the same positions."""
        return -(-self.positions.outputs[1] // FILTERS) * -(-self.positions.images[1] // WEIGHT_GRAD_CHANNELS)

    @property
    def size(self) -> int:
        """Of the gradient."""
        return self.positions.outputs[1] * self.positions.images[1] * math.prod(self.positions.kernel)

    def _cycles(self, splits: int) -> float:
        steps = -(-self.positions.count // self.step)
        rounds = -(-self.blocks * splits // CHIP.multiprocessors)
        products = FILTERS * WEIGHT_GRAD_CHANNELS * math.prod(self.positions.kernel) * self.step * 6 / WEIGHT_GRAD_CYCLE
        return START + rounds * (TILE_END + -(-steps // splits) * products) + (SECOND_PASS if splits > 1 else 0)

    @property
    def splits(self) -> int:
        """Into how many parts the positions are cut."""
        steps = -(-self.positions.count // self.step)
        return min(range(1, min(steps, 2 * CHIP.multiprocessors) + 1), key=self._cycles)

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        return self._cycles(self.splits)

    def suits(self) -> bool:
        """Whether the kernels are right for it, on the GPU at hand."""
        return self.positions.suits() and self.positions.kernel == (3, 3) and self.step > 0

    def kernel(self) -> CudaKernel:
        """The launches: the products of each part, and their sum."""
        splits = self.splits
        definitions = {
            **self.positions.definitions,
            "CHANNELS": WEIGHT_GRAD_CHANNELS,
            "POSITIONS": self.step,
            "SPLIT": int(splits > 1),
        }
        whole = CudaKernel(
            "conv_planes_weight_grad.cu",
            "conv_planes_weight_grad",
            lambda *_, **__: (self.positions.images[0], splits),
            blocks=lambda *_, **__: (self.blocks, splits),
            threads=lambda *_, **__: THREADS[1],
            shared=lambda *_, **__: self._shared(self.step),
            definitions=lambda *_, **__: definitions,
        )
        if splits == 1:
            return whole
        split = replace(whole, scratch=lambda *_, **__: splits * self.size * 4)
        add = replace(
            split,
            name="sum_parts",
            numbers=lambda *_, **__: (self.size, splits),
            blocks=lambda *_, **__: -(-self.size // 32),
            threads=lambda *_, **__: SUMMING,
            shared=no_bytes,
        )
        return replace(split, then=add)
