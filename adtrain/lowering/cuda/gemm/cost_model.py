"""The cost model of matrix products: which tiles compute a product, and into how many splits K is cut.

The estimate of a product's time depends on its shape and the Target only, so choices need no GPU. Cycles are those of a
multiprocessor of an H200.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from adtrain.core.kernel import HOPPER, TENSOR_CORES, WARP, Target
from adtrain.core.precision import FULL
from adtrain.lowering.cuda.gemm.bf16x3 import CHUNK_ELEMENTS, MAX_ELEMENTS, MIN_LENGTH, TILE_K, TILE_M, Bf16x3Tile
from adtrain.lowering.cuda.gemm.packed import PACKED_TILES, PackedTile
from adtrain.lowering.cuda.gemm.tiles import (
    ELEMENT_MMA_TILES,
    FMA_TILES,
    MMA_TILES,
    PIXEL_FMA_TILES,
    PIXEL_MMA_TILES,
    SMALL_TILES,
    MmaKind,
    SmallTile,
    Tile,
)

AnyTile: TypeAlias = "Tile | SmallTile | PackedTile | Bf16x3Tile"


class Gathers(IntEnum):
    """What the columns of a product are: of a matrix, or for implicit GEMM pixels or filter taps."""

    NOTHING = 0
    PIXELS = 1
    ELEMENTS = 2


class Costs(NamedTuple):
    """Fixed costs of a kernel family.

    Args:
        start: cycles from the launch to the first full stage, and from the last one to the end.
        tile_end: cycles of a tile's epilogue.
        second_pass: cycles of the launch that adds the splits.
        per_split: cycles that each split adds to it.
        bytes_per_cycle: global memory traffic of the second pass, or of packing.
    """

    start: float
    tile_end: float = 0
    second_pass: float = 0
    per_split: float = 0
    bytes_per_cycle: float = 1


TILED = Costs(start=3800, second_pass=2500, per_split=100, bytes_per_cycle=4000)
PACKED = Costs(start=3800, bytes_per_cycle=2000)
BF16X3 = Costs(start=6000, tile_end=3000, second_pass=3500, bytes_per_cycle=3000)

FMA_LANES = 128
"""float32 FMA units of a multiprocessor."""
A100, A100_FMA_LANES = (8, 0), 64
"""The compute capability with half of the FMA units; its tensor cores are as fast as those of others."""

SMALL_SPEED = {MmaKind.BF16X3: 1.0, MmaKind.TF32: 1.7, MmaKind.BFLOAT16: 1.8}
"""Speed of `SmallTile` by kind, relative to BF16X3."""
EARLY_WAVES, LATER_WAVE = 8, 1000
"""Waves whose start and end are hidden; cycles of each further wave, in addition to its loads or products."""

BF16X3_MACS, BF16X3_LOADED, BF16X3_UNEVEN = 1850, 3.7, 1.15
"""`gemm/gemm_bf16x3.cu`: bfloat16 multiply-adds and loaded elements per cycle, measured; slowdown of loads where the
tile's 16-byte chunks do not divide evenly among the warps."""
BF16X3_EVEN_WIDTHS = (64, 128)
BF16X3_WIDTHS = (64, 72, 80, 88, 96, 128)
"""Values of Bf16x3Tile.n. Widths between 96 and 128 take as long as 128."""
BF16X3_PRODUCTS = 6
"""bfloat16 products for one of float32."""
BF16X3_MAX_SPLITS = 128

STORED = {Tile: 400, SmallTile: 400, PackedTile: 1000, Bf16x3Tile: 700}
"""By type of tile, the bytes of a result that its epilogue stores in a cycle, while it reads as many. Measured with K =
10 and 128. Kernels of full precision are sorted without it."""
MAX_WAVES_TO_SPLIT = 4
"""Maximum of tiles for each multiprocessor for which K is split."""
MIN_SPLIT_TILES = 4
"""Minimum of packed tiles of K in each split of a packed product."""
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
MAX_BF16X3_K = 256
"""The largest K for bf16x3 tiles by mma.sync except on an A100. Beyond it sliced-K FMA is as exact and fast."""


def mma_kinds(itemsize: int, precision: str, capability: tuple[int, int]) -> tuple[MmaKind, ...]:
    """The kinds for elements of ``itemsize`` bytes and a precision ("full", "tf32", "bfloat16").

    A rounded precision permits rounding: GPUs whose tensor cores take neither format compute it by FMA, unrounded.
    """
    if capability < TENSOR_CORES:
        return (MmaKind.FMA,)
    if itemsize == 8:
        return MmaKind.FMA, MmaKind.FP64
    if precision == FULL:
        return MmaKind.FMA, MmaKind.BF16X3
    return (MmaKind.TF32 if precision == "tf32" else MmaKind.BFLOAT16,)


@lru_cache(maxsize=4096)
def ranked(
    itemsize: int,
    batch: int,
    m: int,
    n: int,
    k: int,
    target: Target,
    precision: str = FULL,
    gathers: Gathers = Gathers.NOTHING,
    k_major: tuple[bool, bool] = (False, False),
) -> Sequence[tuple[AnyTile, int]]:
    """Tiles, and splits of K, for ``batch`` products of m x k and k x n matrices; the fastest by estimate is first.

    Args:
        gathers: for implicit GEMM, what the columns are: then there are only `Tile`s. Pixels have no split-K.
        k_major: whether A is stored [m][k], and B [n][k].
    """
    product = _Product(itemsize, batch, m, n, k, target, k_major)
    found: list[tuple[float, AnyTile, int]] = []
    for tile, counts in product.choices(precision, gathers):
        cycles, splits = min((product.cycles(tile, count), count) for count in counts)
        stores = product.stores(tile) if gathers is Gathers.NOTHING and precision != FULL else 0
        found.append((cycles + stores, tile, splits))
    return [(tile, splits) for _, tile, splits in sorted(found, key=lambda choice: choice[0])]


def product_cycles(
    tile: AnyTile,
    splits: int,
    itemsize: int,
    lengths: tuple[int, int, int, int],
    target: Target,
    k_major: tuple[bool, bool],
) -> float:
    """The estimate for a product of these lengths (batch, M, N, K), with the stores of its epilogue."""
    product = _Product(itemsize, *lengths, target, k_major)
    return product.stores(tile) + product.cycles(tile, splits)


class _Product(NamedTuple):
    """Products whose time is estimated; see `ranked`."""

    itemsize: int
    batch: int
    m: int
    n: int
    k: int
    target: Target
    k_major: tuple[bool, bool]

    def choices(self, precision: str, gathers: Gathers) -> Iterator[tuple[AnyTile, Sequence[int]]]:
        """The tiles, and the splits of K that are possible with each."""
        matrices = gathers is Gathers.NOTHING
        for kind in mma_kinds(self.itemsize, precision, self.target.capability):
            for tile in self._tiles(kind, gathers):
                if tile.shared(self.itemsize) <= self.target.shared:
                    yield tile, [count for count in SPLITS if self._may_split(tile, count, gathers)]
            if matrices and kind not in (MmaKind.FMA, MmaKind.FP64):
                yield from ((SmallTile(*arguments, kind=kind).for_k(self.k), (1,)) for arguments in SMALL_TILES)
        if not matrices or (self.itemsize, self.target.capability) != (4, HOPPER):
            return
        for packed in PACKED_TILES[precision]:
            if packed.suits(self.m, self.n, self.k, self.k_major):
                yield packed, [count for count in SPLITS if self._may_split_packed(packed, count)]
        if precision == FULL:
            for split, count in bf16x3_choices(self.batch, self.m, self.n, self.k, self.target):
                yield split, (count,)

    def _tiles(self, kind: MmaKind, gathers: Gathers) -> Sequence[Tile]:
        if kind is MmaKind.FMA:
            return (PIXEL_FMA_TILES if gathers is Gathers.PIXELS else FMA_TILES)[self.itemsize]
        if gathers is not Gathers.NOTHING:
            return (PIXEL_MMA_TILES if gathers is Gathers.PIXELS else ELEMENT_MMA_TILES).get(kind, ())
        if kind is MmaKind.BF16X3 and self.k > MAX_BF16X3_K and self.target.capability != A100:
            return ()
        return [replace(tile, k_major=self.k_major) for tile in MMA_TILES[kind]]

    def _may_split(self, tile: Tile, splits: int, gathers: Gathers) -> bool:
        few_tiles = self._blocks(tile) <= MAX_WAVES_TO_SPLIT * self.target.multiprocessors
        return splits == 1 or (gathers is not Gathers.PIXELS and splits * tile.k <= self.k and few_tiles)

    def _may_split_packed(self, tile: PackedTile, splits: int) -> bool:
        """Whether each split has at least MIN_SPLIT_TILES packed tiles of K, and all blocks run at once."""
        fills = splits * self._blocks(tile) <= self.target.multiprocessors
        long = tile.kind is not MmaKind.FP16X2 and self.k >= splits * MIN_SPLIT_TILES * tile.k
        return splits == 1 or (fills and long)

    def _blocks(self, tile: AnyTile) -> int:
        return self.batch * -(-self.m // tile.m) * -(-self.n // tile.n)

    def stores(self, tile: AnyTile) -> float:
        """Cycles of the epilogue's stores."""
        return self.batch * self.m * self.n * self.itemsize / STORED[type(tile)]

    def cycles(self, tile: AnyTile, splits: int) -> float:
        """The estimate without these stores."""
        if isinstance(tile, Bf16x3Tile):
            return bf16x3_cycles(tile, self.batch, self.m, self.n, self.k, splits, self.target)
        waves = -(-self._blocks(tile) * splits // self.target.multiprocessors)
        later_waves = max(0, waves - EARLY_WAVES) * LATER_WAVE  # the starts and ends of waves that are not hidden
        if isinstance(tile, SmallTile):
            loaded = (tile.m * (tile.n // tile.warp_n) + tile.n * (tile.m // tile.warp_m)) * self.k * self.itemsize
            return TILED.start + waves * loaded / (tile.speed * SMALL_SPEED[tile.kind]) + later_waves
        sums = 0.0
        if splits > 1:
            moved = (2 * splits + 1) * self.batch * self.m * self.n * self.itemsize
            sums = TILED.second_pass + TILED.per_split * splits + moved / TILED.bytes_per_cycle
        if isinstance(tile, PackedTile):
            direct = tile.direct(self.k, self.k_major)
            packed_rows = sum(rows for rows, is_direct in zip((self.m, self.n), direct, strict=True) if not is_direct)
            pack = self.batch * packed_rows * self.k * tile.packing_bytes / PACKED.bytes_per_cycle + sums
            k = -(-self.k // (splits * tile.k)) * tile.k if splits > 1 else self.k
            launches = tile.launches if packed_rows else 1
            return launches * PACKED.start + pack + waves * k * tile.m * tile.n / (FMA_LANES * tile.speed)
        stages = -(-math.ceil(self.k / tile.k) // splits)
        a100_fma = self.target.capability == A100 and tile.kind is MmaKind.FMA and self.itemsize == 4
        speed = (A100_FMA_LANES if a100_fma else FMA_LANES) * (tile.speed if waves > 1 else tile.speed_alone)
        return TILED.start + waves * stages * tile.k * tile.m * tile.n / speed + later_waves + sums


def bf16x3_choices(batch: int, m: int, n: int, k: int, target: Target) -> Sequence[tuple[Bf16x3Tile, int]]:
    """The fastest tile and splits by estimate, and the fastest tile without split-K."""
    if min(m, n, k) < MIN_LENGTH or max(m, n) * k >= MAX_ELEMENTS:
        return []
    stages = -(-k // TILE_K)
    counts = {-(-stages // per_split) for per_split in range(1, stages + 1)}

    def best(splits: Iterable[int]) -> tuple[Bf16x3Tile, int]:
        choices = ((Bf16x3Tile(width), count) for width in BF16X3_WIDTHS for count in splits)
        return min(choices, key=lambda choice: bf16x3_cycles(choice[0], batch, m, n, k, choice[1], target))

    return list(dict.fromkeys([best(sorted(count for count in counts if count <= BF16X3_MAX_SPLITS)), best([1])]))


def bf16x3_cycles(tile: Bf16x3Tile, batch: int, m: int, n: int, k: int, splits: int, target: Target) -> float:
    """The estimate for `gemm/gemm_bf16x3.cu`."""
    waves = -(-tile.tiles(batch, m, n) * splits // target.multiprocessors)
    stages = -(-k // TILE_K)
    cycles = BF16X3.start + waves * (BF16X3.tile_end + -(-stages // splits) * bf16x3_stage_cycles(tile))
    if splits == 1:
        return cycles
    return cycles + BF16X3.second_pass + 2 * splits * batch * m * n * 4 / BF16X3.bytes_per_cycle


def bf16x3_stage_cycles(tile: Bf16x3Tile) -> float:
    """The estimate for a stage of TILE_K: producers and consumers work at the same time."""
    multiply = TILE_M * tile.n * TILE_K * BF16X3_PRODUCTS / BF16X3_MACS
    chunks = sum(-(-rows * TILE_K // CHUNK_ELEMENTS // WARP) * WARP for rows in (TILE_M, tile.n))
    load = chunks * CHUNK_ELEMENTS / BF16X3_LOADED * (1 if tile.n in BF16X3_EVEN_WIDTHS else BF16X3_UNEVEN)
    return max(multiply, load)
