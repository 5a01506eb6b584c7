"""Convolutions with stride 1 on Hopper's matrix units, float32 in three pieces, or in halves where two hold it
(`kernels/cuda/conv/shifted.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel
from adtrain.lowering.cuda.conv.packed_images import ALIGNED, KNOWN, LAYING, LAYING_BLOCKS, LINE, Laid
from adtrain.lowering.cuda.conv.padded_index import Positions

PIECES, HALVES, GROUP, WORD = 3, 2, 8, 16
"""Numbers that a float32 is cut into; channels of a plane, and the bytes of a position in it."""
FILTERS, TEAMS, COLUMNS = 64, 2, 128
"""Filters of a tile of `conv/shifted_bf16x3.cu`, which stacks the pieces of half as many; its warpgroups, and how many
positions each has, at most."""
HALVES_TILE, MARKED = 288, 144
"""Positions of a tile of `conv/shifted_fp16x2.cu`, and how many of them are left to pieces together."""
LEAST_COLUMNS, STEP = 64, 8
"""The fewest positions of a warpgroup; what they are a multiple of."""
THREADS = 384
"""Of a block of `conv/shifted_bf16x3.cu`, or of `conv/shifted_fp16x2.cu`."""
IMAGE_STAGES, LEAST_STAGES, MOST_STAGES = 2, 3, 8
"""Stages of images in shared memory, and least and most of weights."""
CHANNELS = 32, 16
"""How many may be in a stage, the faster choice first."""
SHARED = 226 << 10
"""Bytes of shared memory that a block can have, beside what it has of its own."""
PASSING = 4 * GROUP * 4
"""Bytes that each gathering thread has of it for what it reads."""
GATHERERS = 96
"""These threads."""
MOST_BLOCKS = 128
"""Tiles of the same positions, so that what is known of their filters fits."""
PRODUCTS, STACKED = {3: 6, 2: 5.25, 1: 4.5}, {3: 4, 2: 3.6, 1: 3.2}
"""Of numbers in three pieces, and of stacked ones; of fewer pieces how many such would take their time, measured."""
PRODUCT, COLUMN, DEPTH = 14.4, 0.451, 16
"""Cycles of a product of 64 rows and so many k in `conv/shifted_bf16x3.cu`, and of each of its columns, measured."""
HALVES_CYCLE = {2: 1980, 1: 1600}
"""Multiply-adds of float16 that a multiprocessor does in a cycle in `shifted_fp16x2.cu`, of so many numbers an operand,
measured."""
GATHERED = 1.2
"""Elements of images that it gathers in a cycle, measured."""
REST = 4000
"""Cycles of a launch that has nothing to do."""
START, END, TILE_END, HALVES_END = 6000, 10, 3500, 8700
"""Cycles of the launches, and until a block has its first stages; of a tile's end, for each position in pieces; in
gradients by the weights; in halves."""


@dataclass(frozen=True)
class PlaneConvolution:
    """A convolution, or its gradient by the images, which is one of the outputs' gradients, too.

    Attributes:
        turned: whether the weights are (C, O, KH, KW), and their elements in reverse order.
        halves: whether operands are halves, or rounded ones the first half (`shifted_fp16x2.cu`),
            not always pieces.
        pooled: whether what is written are the maxima of windows of 2 x 2.
        columns: positions of a warpgroup of `conv/shifted_bf16x3.cu`.
        of_image: the tiles that each image has, `positions` being spread so that images are as far apart; 0 where tiles
            run on from one image to the next.
    """

    positions: Positions
    turned: bool
    halves: bool = False
    pooled: bool = False
    columns: int = COLUMNS
    of_image: int = 0

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

    def fitted(self) -> PlaneConvolution | None:
        """It with the tiles that should be the fastest, if any suit."""
        return min((c for c in self.choices() if c.suits()), key=lambda c: c.cycles, default=None)

    def choices(self) -> Iterator[PlaneConvolution]:
        """It with all tiles that it may have."""
        return iter([self]) if self.halves else self._windows() if self.pooled else self._tiles()

    @property
    def _shares(self) -> int:
        """Of a warpgroup's positions, each for threads of their own."""
        return 2 if self._stacked else 1

    def _widths(self) -> Iterator[int]:
        """Positions that a warpgroup may have, the most first."""
        step = STEP * self._shares
        return (n for n in range(COLUMNS, LEAST_COLUMNS - 1, -STEP) if n % step == 0)

    def _tiles(self) -> Iterator[PlaneConvolution]:
        """Those that run on, and those that begin with each image."""
        for columns in self._widths():
            yield replace(self, columns=columns)
            yield self._by_image(columns, self.positions.outputs[2])

    def _windows(self) -> Iterator[PlaneConvolution]:
        """Those in which a thread's positions are whole pairs of rows, as long as that takes."""
        for columns in self._widths():
            own, least = columns // self._shares, self.positions.pitch
            for pitch in (own // rows for rows in range(2, own // least + 1, 2) if own % rows == 0):
                if pitch % 2 == 0:
                    spread = replace(self.positions, spread=(pitch, 0))
                    yield replace(self, positions=spread)._by_image(columns, self.positions.outputs[2] // 2 * 2)

    def _by_image(self, columns: int, rows: int) -> PlaneConvolution:
        """With tiles that begin with each image and cover so many rows."""
        positions, count = self.positions.by_image(TEAMS * columns, rows)
        return replace(self, positions=positions, columns=columns, of_image=count)

    def _tile(self, parts: int) -> int:
        """Positions of a tile."""
        return TEAMS * self.columns if parts == PIECES else HALVES_TILE

    def _weights(self, parts: int) -> int:
        """Planes of FILTERS rows that weights of so many parts take."""
        if self._stacked:
            return parts - 1
        return self.positions.numbers if parts == HALVES else parts

    def _weight_bytes(self, channels: int, parts: int) -> int:
        """Of a stage of weights."""
        return self._weights(parts) * channels * FILTERS * 2

    def _other_bytes(self, channels: int, parts: int) -> int:
        """Of all else in shared memory, with what it takes to align it."""
        tile = self._tile(parts)
        exchanged = tile * FILTERS * 2 if self._stacked else 0
        if parts == HALVES:
            return IMAGE_STAGES * self.positions.numbers * self._lines * LINE + exchanged + 512
        images = parts * channels // GROUP * (tile + self.positions.reach) * WORD
        return IMAGE_STAGES * images + PASSING * GATHERERS + exchanged + 128

    @property
    def _lines(self) -> int:
        """Of a stage of images in halves: whole groups of eight, which words are exchanged in."""
        skipped = -self.positions.before % 8
        return -(-(skipped + HALVES_TILE + self.positions.reach) // 8) * 8

    def _stages(self, channels: int, parts: int) -> int:
        room = SHARED - self._other_bytes(channels, parts)
        return min(room // self._weight_bytes(channels, parts), MOST_STAGES)

    @property
    def channels(self) -> int:
        """Channels of a stage; 0 where not even the fewest fit."""
        return next((count for count in CHANNELS if self._stages(count, PIECES) >= LEAST_STAGES), 0)

    def shared(self, parts: int = PIECES) -> int:
        """Bytes of shared memory."""
        stages = self._stages(self.channels, parts)
        return self._other_bytes(self.channels, parts) + stages * self._weight_bytes(self.channels, parts)

    def tiles(self, parts: int) -> int:
        if self.of_image:
            return self.positions.images[0] * self.of_image * self._blocks
        return -(-self.positions.count // self._tile(parts)) * self._blocks

    @property
    def _chunks(self) -> int:
        """Of channels."""
        return -(-self.positions.images[1] // self.channels)

    @property
    def products(self) -> int:
        """Length of the sums, channels beyond the last one included."""
        return math.prod(self.positions.kernel) * self._chunks * self.channels

    @property
    def scratch(self) -> int:
        """Bytes: the weights in pieces, and of halves `Made` (shifted_tiles.cuh) and `Laid` (packed_images.cuh)."""
        weights = self._blocks * FILTERS * self.products * 2
        pieces = self._weights(PIECES) * weights
        if not self.halves:
            return pieces
        known = self._blocks * self._filters * KNOWN
        marks = self.tiles(HALVES) * (HALVES_TILE // MARKED) * 4
        return pieces + self._weights(HALVES) * weights + known + marks + ALIGNED + Laid(self.positions).bytes

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        parts = HALVES if self.halves else PIECES
        rounds, tile = -(-self.tiles(parts) // CHIP.multiprocessors), self._tile(parts)
        length = math.prod(self.positions.kernel) * self.channels
        if self.halves:
            numbers = self.positions.numbers
            multiplied = 1 if numbers == 1 else 2 if self._stacked else 3
            products = length * tile * FILTERS * multiplied / HALVES_CYCLE[numbers]
            before = START + 3 * REST + Laid(self.positions).cycles
            return before + rounds * (HALVES_END + self._chunks * products)
        each = (STACKED if self._stacked else PRODUCTS)[self.positions.pieces]
        products = length / DEPTH * each * TEAMS * (PRODUCT + COLUMN * self.columns)
        gathered = (tile + self.positions.reach) * self.channels / GATHERED
        return START + rounds * (END * tile + self._chunks * max(products, gathered))

    def suits(self) -> bool:
        """Whether the kernels are right for it, on the GPU at hand."""
        room = not self.halves or (self.channels * 2 == LINE and self._stages(self.channels, HALVES) >= LEAST_STAGES)
        return self.positions.suits() and self.channels > 0 and self._blocks <= MOST_BLOCKS and room

    def kernel(self) -> LegacyKernel:
        """The launches: weights to pieces, then the products; or what halves hold, the images in halves, the products,
        and the rest in pieces."""
        words = self._blocks * self._filters * self.products // GROUP
        if not self.halves:
            cut = self._step("conv/shifted_bf16x3.cu", "cut_weights", self._macros(PIECES))
            cut = replace(cut, blocks=None, elements=lambda *_, **__: words, threads=None)
            return replace(cut, then=self._multiply(PIECES))
        rest = self._multiply(PIECES, {"REST": 1})
        multiply = replace(self._multiply(HALVES), then=rest)
        stages = self._macros(HALVES)
        blocks = LAYING_BLOCKS * CHIP.multiprocessors
        prepare = self._step("conv/pack_images.cu", "prepare_halves", stages, blocks, LAYING, then=multiply)
        return self._step("conv/pack_images.cu", "begin_halves", stages, CHIP.multiprocessors, LAYING, then=prepare)

    def _macros(self, parts: int) -> Mapping[str, int]:
        """Tunables."""
        stages = {"TILE_STAGES": self._stages(self.channels, parts)}
        tiles = {"TEAM_COLUMNS": self.columns, "OF_IMAGE": self.of_image, "POOLED": int(self.pooled)}
        return stages if parts == HALVES else {**stages, **tiles}

    def _multiply(self, parts: int, rest: Mapping[str, int] | None = None) -> LegacyKernel:
        name = "conv_halves" if parts == HALVES else "conv_planes"
        macros = {**self._macros(parts), **(rest or {})}
        blocks = min(self.tiles(parts), CHIP.multiprocessors)
        file = "conv/shifted_fp16x2.cu" if parts == HALVES else "conv/shifted_bf16x3.cu"
        return self._step(file, name, macros, blocks, THREADS, self.shared(parts))

    def _step(
        self,
        file: str,
        name: str,
        macros: Mapping[str, int],
        blocks: int | tuple[int, int] = 0,
        threads: int = 0,
        shared: int = 0,
        then: LegacyKernel | None = None,
    ) -> LegacyKernel:
        definitions = {
            **self.positions.definitions,
            "CHANNELS": self.channels,
            "WIDE_C": math.gcd(2, self.positions.outputs[3]),
            "TURNED": int(self.turned),
            **macros,
        }
        return LegacyKernel(
            file,
            name,
            lambda *_, **__: self.positions.images[:1],
            blocks=lambda *_, **__: blocks,
            threads=lambda *_, **__: threads,
            shared=lambda *_, **__: shared,
            definitions=lambda *_, **__: definitions,
            scratch=lambda *_, **__: self.scratch,
            then=then,
        )
