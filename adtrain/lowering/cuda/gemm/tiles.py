"""The tiles that products on the GPU are computed with: of `gemm/tile.cuh` and `gemm/small_gemm.cuh`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

WARP, LANES_N = 32, 8
UNIT_K = 16
"""k of a unit of `gemm/small_gemm.cuh`."""


class Unit(IntEnum):
    """What multiplies: fused multiply-adds, or the matrix units with operands in a format (`mma.cuh`, `packed.cuh`)."""

    FUSED = 0
    TF32 = 1
    BFLOAT16 = 2
    PIECES = 3
    DOUBLE = 4
    HALVES = 5


@dataclass(frozen=True)
class Tile:
    """Tunables of `kernels/cuda/gemm/tile.cuh`.

    Args:
        m, n: rows and columns of the tile (BM, BN).
        k: rows of k in a stage (BK).
        warp_m, warp_n: rows and columns of a warp (WM, WN).
        slices: teams of warps that share a stage.
        stages: stages in shared memory.
        blocks: blocks that a multiprocessor must have registers for.
        speed: multiply-adds of several blocks of this tile, as a share of the float32 units', measured.
        alone: the same of one block alone on a multiprocessor.
        unit: what multiplies.
        along: whether the panels of A and B lie as [m][k] and [n][k], for the matrix units.
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
    unit: Unit = Unit.FUSED
    along: tuple[bool, bool] = (False, False)

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * WARP * self.slices

    @property
    def text(self) -> str:
        """The type in CUDA C++."""
        along = "".join(f", {str(i).lower()}" for i in self.along)
        unit = f"Multiplier<{self.warp_m}, {self.warp_n}, {int(self.unit)}{along}>::Unit"
        return f"Tile<{self.m}, {self.n}, {self.k}, {self.slices}, {self.stages}, {unit}>"

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory: the stages, and afterwards the sums of half of the slices."""
        panels = 0
        for lines, along, narrow in zip((self.m, self.n), self.along, self._narrow, strict=True):
            panels += lines * (self.k + 4) if along else self.k * (lines + (8 if narrow else 16 // itemsize))
        return max(self.stages * panels, self.slices // 2 * self.m * self.n) * itemsize

    @property
    def _narrow(self) -> tuple[bool, bool]:
        """Whether a thread holds single rows of A, or pairs, and single columns of B."""
        single = self.unit is Unit.TF32
        return self.along[0] or single, self.along[1] or single

    def definitions(self) -> dict[str, int]:
        return {
            "TILE_M": self.m,
            "TILE_N": self.n,
            "TILE_K": self.k,
            "WARP_M": self.warp_m,
            "WARP_N": self.warp_n,
            "TILE_SLICES": self.slices,
            "TILE_STAGES": self.stages,
            "MIN_BLOCKS": self.blocks,
            "UNIT": int(self.unit),
        }

    def columns_at_once(self, itemsize: int, columns: int) -> int:
        """How many neighbouring columns of the result a thread can store in one go (WIDE_C)."""
        widest = 2 if self._narrow[1] else min(self.warp_n // LANES_N, 16 // itemsize)
        return math.gcd(widest, columns)


@dataclass(frozen=True)
class Direct:
    """Tunables of `kernels/cuda/gemm/small_gemm.cuh`: m, n, warp_m, warp_n, slices and unit as in `Tile`.

    Args:
        ahead: units of 16 k that a warp has under way.
        speed: bytes of operands that a multiprocessor takes in a cycle, measured in pieces.
    """

    m: int
    n: int
    warp_m: int
    warp_n: int
    slices: int
    ahead: int
    speed: float
    unit: Unit = Unit.PIECES

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * WARP * self.slices

    @property
    def text(self) -> str:
        """The type in CUDA C++."""
        unit = f"Mma<{self.warp_m}, {self.warp_n}, Kind({int(self.unit)})>"
        return f"Direct<{self.m}, {self.n}, {self.slices}, {self.ahead}, {unit}>"

    def shared(self, itemsize: int, copied: bool = False) -> int:
        """Bytes of shared memory: the sums of all slices, and before them one or two units of operands for each warp,
        if warps copy them there."""
        sums = self.slices * self.m * (self.n + 16 // itemsize) * itemsize
        lines = self.warp_m + self.warp_n + 2 * 16 // itemsize
        units = self.threads // WARP * min(self.ahead, 2)
        return max(sums, units * UNIT_K * lines * itemsize) if copied else sums

    def suited(self, k: int) -> Direct:
        """The same for sums of k products, of which a warp may have fewer units than it could have under way."""
        return replace(self, ahead=max(1, min(self.ahead, -(-k // (UNIT_K * self.slices)))))

    def definitions(self) -> dict[str, int]:
        return {
            "TILE_M": self.m,
            "TILE_N": self.n,
            "WARP_M": self.warp_m,
            "WARP_N": self.warp_n,
            "TILE_SLICES": self.slices,
            "TILE_AHEAD": self.ahead,
            "UNIT": int(self.unit),
        }

    def columns_at_once(self, itemsize: int, columns: int) -> int:
        """How many neighbouring columns of the result a thread can store in one go (WIDE_C)."""
        return math.gcd(min(self.n, 16 // itemsize), columns)


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

MATRIX_TILES: Mapping[Unit, Sequence[Tile]] = {
    Unit.TF32: (
        Tile(128, 256, 32, 64, 64, 1, 3, 1, 3.2, 3.2, Unit.TF32),
        Tile(256, 128, 32, 64, 64, 1, 3, 1, 3.1, 3.1, Unit.TF32),
        Tile(128, 128, 32, 64, 64, 1, 3, 2, 3.1, 2.0, Unit.TF32),
        Tile(128, 64, 32, 64, 32, 1, 3, 2, 2.1, 1.3, Unit.TF32),
        Tile(64, 64, 32, 32, 32, 1, 3, 3, 2.1, 1.25, Unit.TF32),
        Tile(64, 64, 32, 32, 32, 2, 3, 2, 1.5, 1.2, Unit.TF32),
    ),
    Unit.BFLOAT16: (
        Tile(128, 256, 16, 64, 64, 1, 4, 1, 3.3, 3.3, Unit.BFLOAT16),
        Tile(128, 128, 16, 64, 64, 1, 4, 2, 3.0, 2.2, Unit.BFLOAT16),
        Tile(128, 64, 32, 64, 32, 1, 3, 2, 2.4, 1.5, Unit.BFLOAT16),
        Tile(64, 64, 32, 32, 32, 1, 3, 3, 1.9, 1.35, Unit.BFLOAT16),
        Tile(64, 64, 32, 32, 32, 2, 3, 2, 1.8, 1.3, Unit.BFLOAT16),
    ),
    Unit.PIECES: (
        Tile(64, 64, 32, 32, 32, 1, 3, 2, 0.75, 0.69, Unit.PIECES),
        Tile(64, 64, 16, 32, 32, 1, 4, 3, 0.73, 0.60, Unit.PIECES),
        Tile(32, 64, 32, 32, 16, 1, 3, 3, 0.65, 0.45, Unit.PIECES),
    ),
    Unit.DOUBLE: (
        Tile(128, 64, 16, 32, 32, 1, 3, 1, 0.90, 0.90, Unit.DOUBLE),
        Tile(128, 128, 8, 64, 32, 1, 3, 1, 0.90, 0.90, Unit.DOUBLE),
        Tile(64, 64, 16, 32, 32, 1, 4, 2, 0.82, 0.60, Unit.DOUBLE),
        Tile(64, 32, 16, 32, 16, 1, 4, 3, 0.65, 0.40, Unit.DOUBLE),
        Tile(32, 32, 32, 32, 32, 4, 2, 1, 0.45, 0.40, Unit.DOUBLE),
    ),
}
"""For matrix products on the matrix units."""

WINDOW_MATRIX_TILES: Mapping[Unit, Sequence[Tile]] = {
    unit: tuple(
        Tile(*tunables, unit=unit)
        for tunables in (
            (64, 128, 16, 32, 64, 1, 4, 2, 1.2, 0.7),
            (64, 64, 16, 32, 64, 1, 4, 4, 1.0, 0.5),
            (32, 128, 16, 32, 64, 1, 4, 4, 0.9, 0.5),
            (32, 64, 16, 32, 32, 1, 4, 4, 0.7, 0.35),
            (16, 64, 16, 16, 32, 1, 4, 4, 0.4, 0.2),
        )
    )
    for unit in (Unit.TF32, Unit.BFLOAT16)
}
"""For products whose columns are gathered from images, on the matrix units."""

ELEMENT_MATRIX_TILES: Mapping[Unit, Sequence[Tile]] = {
    unit: tuple(
        Tile(*tunables, unit=unit)
        for tunables in (
            (128, 128, 16, 64, 32, 1, 4, 1, 1.0, 1.0),
            (64, 128, 16, 32, 64, 1, 4, 2, 1.0, 0.6),
            (64, 64, 16, 32, 32, 1, 4, 2, 0.8, 0.5),
            (64, 64, 32, 32, 32, 2, 3, 1, 0.8, 0.6),
            (32, 64, 16, 32, 16, 1, 4, 2, 0.6, 0.4),
        )
    )
    for unit in (Unit.TF32, Unit.BFLOAT16)
}
"""For products with gathered operands whose columns are elements of windows, on the matrix units: more threads, each of
which keeps track of fewer elements."""

DIRECT = (
    (16, 16, 16, 16, 8, 2, 24),
    (32, 16, 32, 16, 8, 4, 16),
    (16, 32, 16, 32, 8, 4, 17),
    (32, 32, 32, 32, 8, 2, 17),
)
"""Tunables of `Direct` but for the unit."""
