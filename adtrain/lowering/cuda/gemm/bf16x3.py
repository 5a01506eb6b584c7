"""WGMMA products that split float32 operands into three bfloat16 terms on the fly (`gemm/gemm_bf16x3.cu`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch, MemoryLayout, Target, memory_layout
from adtrain.lowering.cuda.gemm.tiles import operand_macros, with_split_k

TILE_M, TILE_K, STAGES, BUFFERS = 128, 32, 3, 2
"""Rows of a tile; K of a pipeline stage; stages; buffers of float32 before the split."""
THREADS, PRODUCER_THREADS = 512, 256
"""Threads of a block; threads that load and split operands."""
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
    """

    n: int

    m = TILE_M

    def tiles(self, batch: int, m: int, n: int) -> int:
        """Tiles of ``batch`` results m x n."""
        return batch * -(-m // TILE_M) * -(-n // self.n)


@dataclass(frozen=True)
class Bf16x3Gemm:
    """A matrix product by `gemm/gemm_bf16x3.cu`.

    Attributes:
        lengths: batch, M, N and K.
        splits: of K (split-K).
        transposed: whether A and B are.
    """

    target: Target
    lengths: tuple[int, int, int, int]
    tile: Bf16x3Tile
    splits: int
    transposed: tuple[bool, bool]

    @property
    def tiles(self) -> int:
        return self.tile.tiles(*self.lengths[:3])

    @property
    def shared(self) -> MemoryLayout:
        """The layout of shared memory: stages, and buffers of float32, which the tile of results overwrites."""
        stage = staging = 0
        for rows, k_major in ((TILE_M, not self.transposed[0]), (self.tile.n, self.transposed[1])):
            across, down = (TILE_K // CHUNK_ELEMENTS, rows) if k_major else (rows // CHUNK_ELEMENTS, TILE_K)
            chunks = -(-across * down // PRODUCER_THREADS) * PRODUCER_THREADS
            stage += TERMS * across * (down + (2 if k_major else 1)) * CHUNK_BYTES
            staging += chunks * CHUNK_ELEMENTS * 4
        more = max(self._tile_bytes - BUFFERS * staging, 0)
        arrays = {"STAGES": (stage, STAGES), "TILE": (1, 0), "BUFFERS": (staging, BUFFERS), "REST": (1, more)}
        return memory_layout("SHARED", arrays)

    @property
    def _tile_bytes(self) -> int:
        return TILE_M * (self.tile.n + 4) * 4

    def kernel(self) -> CudaKernel:
        """The product, and with split-K the sum of the splits."""
        blocks = min(self.tiles * self.splits, self.target.multiprocessors)
        product = CudaLaunch(
            "gemm/gemm_bf16x3.cu",
            "gemm_bf16x3",
            (*self.lengths, self.splits),
            (FLOAT32,),
            blocks=blocks,
            threads=THREADS,
            shared=self.shared,
            definitions={
                **operand_macros(self.lengths, self.transposed),
                "WIDE_C": math.gcd(2, self.lengths[2]),
                "WIDE_TILE": math.gcd(4, self.lengths[2]),
                "TILE_N": self.tile.n,
                "SPLIT": int(self.splits > 1),
                "ONE_TILE": int(blocks == self.tiles * self.splits),
                "TILE_BYTES": self._tile_bytes,
            },
        )
        return with_split_k(product, FLOAT32, *self.lengths[:3], self.splits)
