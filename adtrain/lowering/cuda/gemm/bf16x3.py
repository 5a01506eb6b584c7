"""WGMMA products that split float32 operands into three bfloat16 terms on the fly (`gemm/gemm_bf16x3.cu`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.target import Target
from adtrain.lowering.cuda.gemm.split_k import split_k_scratch, split_k_sum

TILE_M, TILE_K, STAGES = 128, 32, 3
"""Rows of a tile; K of a pipeline stage; stages."""
THREADS = 512
"""Threads of a block."""
TERMS, CHUNK_ELEMENTS, CHUNK_BYTES = 3, 8, 16
"""bfloat16 terms of a float32; elements and bytes of a chunk, the unit of shared memory."""
MIN_LENGTH = 64
"""The minimum of M, N and K that fills tiles."""
MAX_ELEMENTS = 1 << 30
"""Maximum of elements of an operand: the kernel's offsets are 32 bits, and exceed the end by up to a tile."""
FLOAT32 = np.dtype("float32")


@dataclass(frozen=True)
class Bf16x3Tile:
    """Template arguments of `gemm/gemm_bf16x3.cu`.

    Args:
        n: columns of a tile (TILE_N).
        m: rows of a tile (TILE_M).
    """

    n: int
    m: int = TILE_M

    def tiles(self, batch: int, m: int, n: int) -> int:
        """Tiles of ``batch`` results m x n."""
        return batch * -(-m // self.m) * -(-n // self.n)


def pipeline_bytes(tile: Bf16x3Tile, transposed: tuple[bool, bool]) -> tuple[int, int]:
    """Shared memory of the stages, and of the buffers of float32 before the split."""
    stage = 0
    for rows, k_major in ((tile.m, not transposed[0]), (tile.n, transposed[1])):
        across, down = (TILE_K // CHUNK_ELEMENTS, rows) if k_major else (rows // CHUNK_ELEMENTS, TILE_K)
        stage += TERMS * across * (down + (2 if k_major else 1)) * CHUNK_BYTES
    buffers = 2 if tile.m + tile.n > 192 else 3
    return STAGES * stage, buffers * (tile.m + tile.n) * TILE_K * FLOAT32.itemsize


@dataclass(frozen=True)
class Bf16x3Gemm:
    """A matrix product by `gemm/gemm_bf16x3.cu`.

    Attributes:
        lengths: batch, M, N and K.
        splits: of K (split-K).
        transposed: whether A and B are.
        whole_rows: whether the epilogue takes whole rows. Then a tile has all columns.
    """

    target: Target
    lengths: tuple[int, int, int, int]
    tile: Bf16x3Tile
    splits: int
    transposed: tuple[bool, bool]
    whole_rows: bool = False

    @property
    def tiles(self) -> int:
        return self.tile.tiles(*self.lengths[:3])

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements per load of A and B, and per store of C."""
        _, m, n, k = self.lengths
        transpose_a, transpose_b = self.transposed
        return {
            "WIDE_A": math.gcd(4, m if transpose_a else k),
            "WIDE_B": math.gcd(4, k if transpose_b else n),
            "WIDE_C": math.gcd(2, n),
            "WIDE_TILE": math.gcd(4, n),
        }

    @property
    def blocks(self) -> int:
        tiles = self.tiles * self.splits
        return tiles if self.whole_rows else min(tiles, self.target.multiprocessors)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the stages, and buffers of float32, which the tile of results overwrites."""
        stages, buffers = pipeline_bytes(self.tile, self.transposed)
        return stages + max(buffers, TILE_M * (self.tile.n + 4) * FLOAT32.itemsize)

    def kernel(self) -> CudaKernel:
        """The product, and with split-K the sum of the splits."""
        batch, m, n, _ = self.lengths
        product = CudaLaunch(
            "gemm/gemm_bf16x3.cu",
            "gemm_bf16x3",
            (*self.lengths, self.splits),
            (FLOAT32,),
            blocks=self.blocks,
            threads=THREADS,
            shared=self.shared,
            definitions={
                **{f"TRANSPOSE_{x}": int(t) for x, t in zip("AB", self.transposed, strict=True)},
                **self.widths,
                "TILE_M": self.tile.m,
                "TILE_N": self.tile.n,
                **({"WHOLE_ROWS": 1} if self.whole_rows else {}),
                "SPLIT": int(self.splits > 1),
                "ONE_TILE": int(self.blocks == self.tiles * self.splits),
                "SHARED_BYTES": self.shared,
            },
        )
        if self.splits == 1:
            return CudaKernel((product,))
        size = batch, m, n, self.splits
        return CudaKernel((product, split_k_sum(FLOAT32, *size)), split_k_scratch(FLOAT32, *size))
