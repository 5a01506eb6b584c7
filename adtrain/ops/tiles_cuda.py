"""Which tile a matrix product on the GPU is computed with, and into how many parts its k is cut.

`kernels/cuda/tile.cuh` says what the tunables mean. The choice is a rule: the smallest estimate of the time, from the
shape and the number of multiprocessors; it needs no GPU, so that what runs is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

WARP, LANES_M, LANES_N = 32, 4, 8


@dataclass
class Chip:
    """What the rule needs to know of the GPU."""

    multiprocessors: int = 132
    capability: tuple[int, int] = (9, 0)


CHIP = Chip()
"""The GPU that kernels are chosen for: an H200, unless the backend has found another one and said so here."""


@dataclass(frozen=True)
class Tile:
    """Tunables of `kernels/cuda/tile.cuh`.

    Args:
        m, n: rows and columns of the tile (BM, BN).
        k: rows of k in a stage (BK).
        warp_m, warp_n: rows and columns of a warp (WM, WN).
        slices: teams of warps that share a stage.
        stages: stages in shared memory.
        blocks: blocks that a multiprocessor must have registers for.
        speed: share of the multiprocessor's multiply-adds that several blocks of this tile reach, measured.
        alone: the same of one block alone on a multiprocessor.
    """

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    slices: int
    stages: int
    blocks: int
    speed: float
    alone: float

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * WARP * self.slices

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory: the stages, and afterwards the sums of half of the slices."""
        vector = 16 // itemsize
        stages = self.stages * self.k * (self.m + self.n + 2 * vector)
        return max(stages, self.slices // 2 * self.m * self.n) * itemsize

    def definitions(self) -> dict[str, int]:
        return {
            "BM": self.m,
            "BN": self.n,
            "BK": self.k,
            "WM": self.warp_m,
            "WN": self.warp_n,
            "SLICES": self.slices,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.blocks,
        }

    def columns_at_once(self, itemsize: int, columns: int) -> int:
        """How many neighbouring columns of the result a thread can store in one go (WIDE_C)."""
        return math.gcd(min(self.warp_n // LANES_N, 16 // itemsize), columns)


TILES: Mapping[int, Sequence[Tile]] = {
    4: (
        Tile(128, 128, 8, 64, 64, 1, 4, 2, 0.75, 0.60),
        Tile(64, 64, 16, 32, 64, 2, 4, 2, 0.63, 0.52),
        Tile(64, 64, 32, 32, 64, 4, 3, 1, 0.58, 0.56),
        Tile(32, 32, 64, 32, 32, 8, 3, 1, 0.45, 0.40),
        Tile(16, 32, 64, 16, 32, 8, 3, 1, 0.34, 0.30),
        Tile(32, 16, 64, 32, 16, 8, 3, 1, 0.30, 0.24),
        Tile(16, 16, 64, 16, 16, 8, 3, 1, 0.24, 0.19),
    ),
    8: (
        Tile(64, 128, 8, 32, 64, 1, 3, 2, 0.35, 0.28),
        Tile(64, 64, 16, 32, 32, 2, 3, 1, 0.32, 0.26),
        Tile(32, 32, 32, 32, 32, 8, 3, 1, 0.22, 0.20),
        Tile(16, 32, 32, 16, 32, 8, 3, 1, 0.18, 0.15),
        Tile(16, 16, 64, 16, 16, 8, 2, 1, 0.14, 0.11),
    ),
}
"""For matrix products, by the bytes of an element."""

WINDOW_TILES: Mapping[int, Sequence[Tile]] = {
    4: (
        Tile(128, 128, 8, 64, 64, 1, 4, 2, 0.57, 0.45),
        Tile(64, 128, 8, 32, 64, 1, 4, 2, 0.49, 0.35),
        Tile(64, 64, 8, 32, 64, 1, 4, 4, 0.48, 0.30),
        Tile(32, 128, 8, 32, 64, 1, 4, 4, 0.47, 0.28),
        Tile(32, 64, 8, 32, 32, 1, 4, 4, 0.37, 0.20),
        Tile(16, 128, 8, 16, 64, 1, 4, 4, 0.35, 0.20),
        Tile(16, 64, 8, 16, 32, 1, 4, 4, 0.27, 0.15),
    ),
    8: (
        Tile(64, 128, 8, 32, 64, 1, 3, 2, 0.30, 0.22),
        Tile(32, 64, 8, 32, 32, 1, 3, 4, 0.22, 0.15),
        Tile(16, 64, 8, 16, 32, 1, 3, 4, 0.16, 0.10),
    ),
}
"""For products whose columns are gathered from images: a thread keeps to its columns, so there are as many of them."""

LANES = 128
"""float32 multiply-adds of a multiprocessor in a cycle."""
START = 3800
"""Cycles of the launch, until a block has its first stages, and from its last one until the sums are in memory."""
SECOND_PASS, PART, BYTES_PER_CYCLE = 2500, 100, 4000
"""Cycles until the sum of the parts begins and that each part adds, and what it reads and writes in a cycle."""
FULL = 4
"""Blocks for each multiprocessor from which on cutting k gains nothing."""
PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)


@lru_cache(maxsize=4096)
def choose(
    itemsize: int, batch: int, m: int, n: int, k: int, multiprocessors: int, windows: bool = False, cut: bool = True
) -> tuple[Tile, int]:
    """The tile and the number of parts of k for ``batch`` products of m x k and k x n matrices.

    Args:
        windows: for a gathered right-hand side, see `WINDOW_TILES`.
        cut: whether k may be cut.
    """

    def estimate(tile: Tile, parts: int) -> float:
        blocks = batch * -(-m // tile.m) * -(-n // tile.n) * parts
        rounds = -(-blocks // multiprocessors)
        share = tile.speed if rounds > 1 else tile.alone
        stages = -(-math.ceil(k / tile.k) // parts)
        cycles = START + rounds * stages * tile.k * tile.m * tile.n / (LANES * share)
        if parts > 1:
            cycles += SECOND_PASS + PART * parts + (2 * parts + 1) * batch * m * n * itemsize / BYTES_PER_CYCLE
        return cycles

    def useful(tile: Tile, parts: int) -> bool:
        blocks = batch * -(-m // tile.m) * -(-n // tile.n)
        return parts == 1 or (cut and parts * tile.k <= k and blocks <= FULL * multiprocessors)

    tiles = (WINDOW_TILES if windows else TILES)[itemsize]
    possible = [(tile, parts) for tile in tiles for parts in PARTS if useful(tile, parts)]
    return min(possible, key=lambda choice: estimate(*choice))


def chosen(
    dtype: np.dtype, batch: int, m: int, n: int, k: int, windows: bool = False, cut: bool = True
) -> tuple[Tile, int]:
    """`choose` for the GPU at hand."""
    return choose(dtype.itemsize, batch, m, n, k, CHIP.multiprocessors, windows, cut)
