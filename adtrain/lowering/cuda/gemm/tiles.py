"""Tile shapes of the matrix products in `gemm/tile.cuh` and `gemm/small_gemm.cuh`; macros of operands; split-K."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from adtrain.core.kernel import WARP, CudaKernel, CudaLaunch

MAX_LENGTH = (1 << 31) - (1 << 10)
"""Maximum of M, N and K of a product, so that 32 bits count the rows and columns of the last tile too."""
FMA_LANES_N = 8
"""Lanes of a warp side by side in the N direction of `Fma` (`gemm/tile.cuh`)."""
SMALL_K = 16
"""K that a warp of `gemm/small_gemm.cuh` takes at a time (K_STEP)."""


def transposes(transposed: Sequence[bool]) -> dict[str, int]:
    """The macros that say whether A and B are transposed."""
    return {f"TRANSPOSE_{x}": int(t) for x, t in zip("AB", transposed, strict=True)}


def operand_macros(lengths: Sequence[int], transposed: Sequence[bool]) -> dict[str, int]:
    """The same, and the elements per load of float32 matrices of these lengths: batch, M, N and K."""
    _, m, n, k = lengths
    wide_a, wide_b = (math.gcd(4, length) for length in (m if transposed[0] else k, k if transposed[1] else n))
    return {**transposes(transposed), "WIDE_A": wide_a, "WIDE_B": wide_b}


class MmaKind(IntEnum):
    """The arithmetic of a product: FMA, or an mma instruction and the format of its operands (`gemm/mma.cuh`)."""

    FMA = 0
    TF32 = 1
    BFLOAT16 = 2
    BF16X3 = 3
    FP64 = 4
    FP16X2 = 5


@dataclass(frozen=True)
class Tile:
    """Template arguments of `Tile` in `gemm/tile.cuh`.

    Args:
        m, n: rows and columns of the block's tile (BM, BN).
        k: depth of a pipeline stage (BK).
        warp_m, warp_n: rows and columns of a warp's tile (WM, WN).
        slices: groups of warps that share a stage and split its K (sliced-K).
        stages: pipeline stages in shared memory.
        min_blocks: blocks per multiprocessor in __launch_bounds__.
        speed: throughput of a multiprocessor with several blocks of this tile, measured; 1 is the float32 FMA peak.
        speed_alone: the same with one block per multiprocessor.
        kind: the arithmetic.
        k_major: whether A and B are stored [m][k] and [n][k] in shared memory. Only for tensor cores.
    """

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    slices: int
    stages: int
    min_blocks: int
    speed: float
    speed_alone: float
    kind: MmaKind = MmaKind.FMA
    k_major: tuple[bool, bool] = (False, False)

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * WARP * self.slices

    def cuda_type(self, shared: int) -> str:
        """The type in CUDA C++, with `shared` bytes of shared memory."""
        k_major = "".join(f", {str(i).lower()}" for i in self.k_major)
        mma = f"WarpMma<{self.warp_m}, {self.warp_n}, {int(self.kind)}{k_major}>::type"
        return f"Tile<{self.m}, {self.n}, {self.k}, {self.slices}, {self.stages}, {mma}, {shared}>"

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory: the larger of the pipeline and the accumulators of half of the slices."""
        stage = 0
        for rows, k_major, narrow in zip((self.m, self.n), self.k_major, self._narrow, strict=True):
            stage += rows * (self.k + 4) if k_major else self.k * (rows + (8 if narrow else 16 // itemsize))
        return max(self.stages * stage, self.slices // 2 * self.m * self.n) * itemsize

    @property
    def _narrow(self) -> tuple[bool, bool]:
        """Whether a lane holds fewer neighbouring rows of A, and columns of B, than a 16-byte access has."""
        tf32 = self.kind is MmaKind.TF32
        return self.k_major[0] or tf32, self.k_major[1] or tf32

    def definitions(self) -> dict[str, int]:
        return {
            "TILE_M": self.m,
            "TILE_N": self.n,
            "TILE_K": self.k,
            "WARP_M": self.warp_m,
            "WARP_N": self.warp_n,
            "TILE_SLICES": self.slices,
            "TILE_STAGES": self.stages,
            "MIN_BLOCKS": self.min_blocks,
            "MMA_KIND": int(self.kind),
        }

    def store_width(self, itemsize: int, columns: int) -> int:
        """Neighbouring columns of C that a thread stores at once (WIDE_C); divides ``columns``."""
        widest = 2 if self._narrow[1] else min(self.warp_n // FMA_LANES_N, 16 // itemsize)
        return math.gcd(widest, columns)


@dataclass(frozen=True)
class SmallTile:
    """Template arguments of `SmallTile` in `gemm/small_gemm.cuh`; m, n, warp_m, warp_n, slices and kind as in `Tile`.

    Args:
        prefetch: K steps of SMALL_K that a warp loads ahead.
        speed: bytes of operands that a multiprocessor loads in a cycle, measured with BF16X3.
    """

    m: int
    n: int
    warp_m: int
    warp_n: int
    slices: int
    prefetch: int
    speed: float
    kind: MmaKind = MmaKind.BF16X3

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * WARP * self.slices

    def cuda_type(self, shared: int) -> str:
        """The type in CUDA C++, with `shared` bytes of shared memory."""
        mma = f"Mma<{self.warp_m}, {self.warp_n}, MmaKind({int(self.kind)})>"
        return f"SmallTile<{self.m}, {self.n}, {self.slices}, {self.prefetch}, {mma}, {shared}>"

    def shared(self, itemsize: int, staged: bool = False) -> int:
        """Bytes of shared memory: the accumulators of all slices.

        Args:
            staged: each warp copies its operands through shared memory first: up to two K steps of them.
        """
        sums = self.slices * self.m * (self.n + 16 // itemsize) * itemsize
        rows = self.warp_m + self.warp_n + 2 * 16 // itemsize
        steps = self.threads // WARP * min(self.prefetch, 2)
        return max(sums, steps * SMALL_K * rows * itemsize) if staged else sums

    def for_k(self, k: int) -> SmallTile:
        """The same tile with no more K steps loaded ahead than a warp has."""
        return replace(self, prefetch=max(1, min(self.prefetch, -(-k // (SMALL_K * self.slices)))))

    def definitions(self) -> dict[str, int]:
        return {
            "TILE_M": self.m,
            "TILE_N": self.n,
            "WARP_M": self.warp_m,
            "WARP_N": self.warp_n,
            "TILE_SLICES": self.slices,
            "TILE_PREFETCH": self.prefetch,
            "MMA_KIND": int(self.kind),
        }

    def store_width(self, itemsize: int, columns: int) -> int:
        """Neighbouring columns of C that a thread stores at once (WIDE_C); divides ``columns``."""
        return math.gcd(min(self.n, 16 // itemsize), columns)


FMA_TILES: Mapping[int, Sequence[Tile]] = {
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
"""FMA tiles of matrix products, by bytes of an element."""

PIXEL_FMA_TILES: Mapping[int, Sequence[Tile]] = {
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
"""FMA tiles of implicit GEMM whose columns are pixels. n is a multiple of threads: a thread always gathers the same
columns."""

MMA_TILES: Mapping[MmaKind, Sequence[Tile]] = {
    MmaKind.TF32: (
        Tile(128, 256, 32, 64, 64, 1, 3, 1, 3.2, 3.2, MmaKind.TF32),
        Tile(256, 128, 32, 64, 64, 1, 3, 1, 3.1, 3.1, MmaKind.TF32),
        Tile(128, 128, 32, 64, 64, 1, 3, 2, 3.1, 2.0, MmaKind.TF32),
        Tile(128, 64, 32, 64, 32, 1, 3, 2, 2.1, 1.3, MmaKind.TF32),
        Tile(64, 64, 32, 32, 32, 1, 3, 3, 2.1, 1.25, MmaKind.TF32),
        Tile(64, 64, 32, 32, 32, 2, 3, 2, 1.5, 1.2, MmaKind.TF32),
    ),
    MmaKind.BFLOAT16: (
        Tile(128, 256, 16, 64, 64, 1, 4, 1, 3.3, 3.3, MmaKind.BFLOAT16),
        Tile(128, 128, 16, 64, 64, 1, 4, 2, 3.0, 2.2, MmaKind.BFLOAT16),
        Tile(128, 64, 32, 64, 32, 1, 3, 2, 2.4, 1.5, MmaKind.BFLOAT16),
        Tile(64, 64, 32, 32, 32, 1, 3, 3, 1.9, 1.35, MmaKind.BFLOAT16),
        Tile(64, 64, 32, 32, 32, 2, 3, 2, 1.8, 1.3, MmaKind.BFLOAT16),
    ),
    MmaKind.BF16X3: (
        Tile(64, 64, 32, 32, 32, 1, 3, 2, 0.75, 0.69, MmaKind.BF16X3),
        Tile(64, 64, 16, 32, 32, 1, 4, 3, 0.73, 0.60, MmaKind.BF16X3),
        Tile(32, 64, 32, 32, 16, 1, 3, 3, 0.65, 0.45, MmaKind.BF16X3),
    ),
    MmaKind.FP64: (
        Tile(128, 64, 16, 32, 32, 1, 3, 1, 0.90, 0.90, MmaKind.FP64),
        Tile(128, 128, 8, 64, 32, 1, 3, 1, 0.90, 0.90, MmaKind.FP64),
        Tile(64, 64, 16, 32, 32, 1, 4, 2, 0.82, 0.60, MmaKind.FP64),
        Tile(64, 32, 16, 32, 16, 1, 4, 3, 0.65, 0.40, MmaKind.FP64),
        Tile(32, 32, 32, 32, 32, 4, 2, 1, 0.45, 0.40, MmaKind.FP64),
    ),
}
"""Tensor core tiles of matrix products."""

PIXEL_MMA_TILES: Mapping[MmaKind, Sequence[Tile]] = {
    kind: tuple(
        Tile(*arguments, kind=kind)
        for arguments in (
            (64, 128, 16, 32, 64, 1, 4, 2, 1.2, 0.7),
            (64, 64, 16, 32, 64, 1, 4, 4, 1.0, 0.5),
            (32, 128, 16, 32, 64, 1, 4, 4, 0.9, 0.5),
            (32, 64, 16, 32, 32, 1, 4, 4, 0.7, 0.35),
            (16, 64, 16, 16, 32, 1, 4, 4, 0.4, 0.2),
        )
    )
    for kind in (MmaKind.TF32, MmaKind.BFLOAT16)
}
"""Tensor core tiles of implicit GEMM whose columns are pixels."""

ELEMENT_MMA_TILES: Mapping[MmaKind, Sequence[Tile]] = {
    kind: tuple(
        Tile(*arguments, kind=kind)
        for arguments in (
            (128, 128, 16, 64, 32, 1, 4, 1, 1.0, 1.0),
            (64, 128, 16, 32, 64, 1, 4, 2, 1.0, 0.6),
            (64, 64, 16, 32, 32, 1, 4, 2, 0.8, 0.5),
            (64, 64, 32, 32, 32, 2, 3, 1, 0.8, 0.6),
            (32, 64, 16, 32, 16, 1, 4, 2, 0.6, 0.4),
        )
    )
    for kind in (MmaKind.TF32, MmaKind.BFLOAT16)
}
"""Tensor core tiles of implicit GEMM whose columns are filter taps: more threads, so each needs fewer offsets."""

SMALL_TILES = (
    (16, 16, 16, 16, 8, 2, 24),
    (32, 16, 32, 16, 8, 4, 16),
    (16, 32, 16, 32, 8, 4, 17),
    (32, 32, 32, 32, 8, 2, 17),
)
"""Arguments of `SmallTile` without the kind."""


SUM_THREADS = 256
"""Threads of a block."""
GROUPS, MAX_GROUPED_SIZE, MIN_GROUPED_SPLITS = 8, 1 << 16, 16
"""Threads that share an element where there are at most MAX_GROUPED_SIZE elements, and at least MIN_GROUPED_SPLITS
splits."""


def split_k_sum(dtype: np.dtype, batch: int, m: int, n: int, splits: int, by_member: bool = False) -> CudaLaunch:
    """Adds ``splits`` partial sums of ``batch`` matrices m x n, which lie one after another in scratch.

    With ``by_member`` the matrices are those of any number of members, on which the order of a sum must not depend.
    """
    size = batch * m * n
    groups = GROUPS if (by_member or size <= MAX_GROUPED_SIZE) and splits >= MIN_GROUPED_SPLITS else 1
    return CudaLaunch(
        "gemm/split_k_sum.cu",
        "split_k_sum",
        (size, m, n, splits),
        (dtype,),
        blocks=-(-size * groups // SUM_THREADS),
        threads=SUM_THREADS,
        definitions={"GROUPS": groups},
    )


def with_split_k(
    product: CudaLaunch, dtype: np.dtype, batch: int, m: int, n: int, splits: int, by_member: bool = False
) -> CudaKernel:
    """A product, and with split-K the sum of the splits, which lie in scratch."""
    if splits == 1:
        return CudaKernel((product,))
    second = split_k_sum(dtype, batch, m, n, splits, by_member)
    return CudaKernel((product, second), splits * batch * m * n * dtype.itemsize)
