"""Large matrix products on Hopper: operands packed for TMA and WGMMA (`gemm/packed.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adtrain.core.kernel import Arrays, CudaKernel, CudaLaunch, MemoryLayout, Target, lengths, memory_layout
from adtrain.lowering.cuda.gemm.tiles import FMA_TILES, MmaKind, Tile, operand_macros, split_k_sum

PACKED_ROWS, PACKED_BYTES = 128, 128 * 128
"""Rows and bytes of a packed tile. The packed rows of an operand are the rows of op(A) or the columns of op(B)."""
PACK_THREADS, GEMM_THREADS = 256, 384
"""Threads of a block of `gemm/pack.cu` and `gemm/packed_gemm.cu`."""
STATS_CHUNKS, MIN_CHUNK_TILES = 16, 2
"""The most chunks into which `gemm/pack.cu` cuts K, and the fewest packed tiles of a chunk."""
FLOAT32 = np.dtype("float32")

STRUCT_BYTES = {"VOTES": 128, "LISTS": 256, "STATS": 32, "PARTIAL_STATS": 32, "MAPS": 256}
"""Bytes of the structs in scratch."""


@dataclass(frozen=True)
class PackedTile:
    """Template arguments of `gemm/packed.cuh` and `gemm/packed_gemm.cu`.

    Args:
        kind: TF32, BFLOAT16, or FP16X2 for full float32.
        terms: maximum of terms of a float32 (MAX_TERMS): FP16X2 may change to BF16X3 at run time.
        staged_terms: terms of an element in each of TILE_STAGES stages.
        k: K of a packed tile.
        n: columns of a tile of the result (TILE_N).
        stages: pipeline stages in shared memory.
        min_k: for FP16X2 the minimum of K for which it is as exact as sequential FMA; for others to be fast.
        packing_bytes: global memory traffic for each element that is packed.
        launches: number of launches.
        speed: throughput of a multiprocessor, measured; 1 is the float32 FMA peak.
    """

    kind: MmaKind
    terms: int
    staged_terms: int
    k: int
    n: int
    stages: int
    min_k: int
    packing_bytes: int
    launches: int
    speed: float

    m = PACKED_ROWS

    @property
    def packed_tiles_n(self) -> int:
        """Packed tiles of op(B) side by side in a tile of the result (TILES_N)."""
        return max(self.n // PACKED_ROWS, 1)

    @property
    def shared(self) -> MemoryLayout:
        stage = (self.m + self.n) * self.staged_terms * (PACKED_BYTES // PACKED_ROWS)
        return memory_layout("SHARED", {"STAGES": (stage, self.stages)}, alignment=1024)

    @property
    def fallback_tile(self) -> Tile:
        """The FMA tile of `gemm/fp32_fallback.cu`."""
        return replace(FMA_TILES[4][0], n=self.n, warp_n=self.n // 2)

    def direct(self, k: int, k_major: tuple[bool, bool]) -> tuple[bool, bool]:
        """Whether TMA reads A and B without packing: in tf32, K-major matrices with rows of whole 16 bytes."""
        aligned = self.kind is MmaKind.TF32 and k % 4 == 0
        return aligned and k_major[0], aligned and k_major[1]

    @property
    def packs_b(self) -> bool:
        """Whether B may be packed: its columns are whole packed tiles, or a part of one."""
        return self.n % PACKED_ROWS == 0 or self.n < PACKED_ROWS

    def suits(self, m: int, n: int, k: int, k_major: tuple[bool, bool]) -> bool:
        large = min(m, n) >= PACKED_ROWS and k >= self.min_k
        return large and (self.packs_b or self.direct(k, k_major)[1])


PACKED_TILES: Mapping[str, Sequence[PackedTile]] = {
    "full": (
        PackedTile(MmaKind.FP16X2, 3, 2, 64, 128, 3, 768, 12, 5, 4.0),
        PackedTile(MmaKind.FP16X2, 3, 2, 64, 64, 4, 768, 12, 5, 3.2),
    ),
    "tf32": (
        PackedTile(MmaKind.TF32, 1, 1, 32, 256, 4, 64, 8, 2, 7.0),
        PackedTile(MmaKind.TF32, 1, 1, 32, 192, 5, 64, 8, 2, 7.0),
        PackedTile(MmaKind.TF32, 1, 1, 32, 128, 6, 64, 8, 2, 5.5),
        PackedTile(MmaKind.TF32, 1, 1, 32, 64, 8, 64, 8, 2, 4.0),
    ),
    "bfloat16": (
        PackedTile(MmaKind.BFLOAT16, 1, 1, 64, 256, 4, 64, 6, 2, 11.5),
        PackedTile(MmaKind.BFLOAT16, 1, 1, 64, 128, 6, 64, 6, 2, 9.0),
        PackedTile(MmaKind.BFLOAT16, 1, 1, 64, 64, 8, 64, 6, 2, 6.5),
    ),
}
"""The candidates by precision. Narrow tiles spread a small result over all multiprocessors."""


@dataclass(frozen=True)
class PackedGemm:
    """A matrix product of packed operands.

    Attributes:
        lengths: batch, M, N and K.
        transposed: whether A and B are.
        splits: of K (split-K); 1 for FP16X2.
    """

    target: Target
    lengths: tuple[int, int, int, int]
    tile: PackedTile
    transposed: tuple[bool, bool]
    splits: int = 1

    @property
    def tiles(self) -> int:
        """Tiles of the results."""
        batch, m, n, _ = self.lengths
        return batch * -(-m // PACKED_ROWS) * -(-n // self.tile.n)

    @property
    def row_blocks(self) -> int:
        """Blocks of PACKED_ROWS packed rows in all operands."""
        batch, m, n, _ = self.lengths
        side_by_side = self.tile.packed_tiles_n
        return batch * (-(-m // PACKED_ROWS) + -(-n // (side_by_side * PACKED_ROWS)) * side_by_side)

    @property
    def direct(self) -> tuple[bool, bool]:
        """Whether TMA reads A and B without packing."""
        transpose_a, transpose_b = self.transposed
        return self.tile.direct(self.lengths[-1], (not transpose_a, transpose_b))

    @property
    def packed_row_blocks(self) -> int:
        """The number of row blocks that are packed."""
        batch, m, _, _ = self.lengths
        of_a = batch * -(-m // PACKED_ROWS)
        direct_a, direct_b = self.direct
        return (0 if direct_a else of_a) + (0 if direct_b else self.row_blocks - of_a)

    @property
    def k_tiles(self) -> int:
        """Packed tiles along K."""
        return -(-self.lengths[-1] // self.tile.k)

    @property
    def chunks(self) -> int:
        """Chunks of K in `gemm/pack.cu`, each by a block of its own."""
        return min(-(-self.k_tiles // MIN_CHUNK_TILES), STATS_CHUNKS)

    @property
    def scratch(self) -> MemoryLayout:
        """The layout of scratch. `PackedLayout` in `gemm/packed.cuh` explains the arrays."""
        fp16x2, splits = self.tile.kind is MmaKind.FP16X2, self.splits if self.splits > 1 else 0
        batch, m, n, _ = self.lengths
        packed_tiles = self.packed_row_blocks * self.k_tiles
        blocks = {"tiles": self.tiles, "row_blocks": self.row_blocks, "chunks": self.chunks}
        numbers = tiles, row_blocks, chunks, packed, size = lengths(**blocks, packed=packed_tiles, size=batch * m * n)
        rows = row_blocks * PACKED_ROWS
        counts = {"VOTES": size * 0 + 1, "LISTS": tiles, "STATS": rows, "PARTIAL_STATS": chunks * rows}
        arrays: Arrays = {
            **{name: (STRUCT_BYTES[name], count * int(fp16x2)) for name, count in counts.items()},
            "PARTIAL_SUMS": (4, (size * splits).rounded_up(128 // 4)),
            "PACKED": (1, packed * (self.tile.terms * PACKED_BYTES)),
            "MAPS": (STRUCT_BYTES["MAPS"], 0 if fp16x2 else self.target.multiprocessors),
        }
        return memory_layout("SCRATCH", arrays, *numbers)

    @property
    def voting_tiles(self) -> int:
        """Blocks of `row_stats`: pairs of row blocks that vote on the precision (PackedLayout::voting_tiles)."""
        batch, m, n, _ = self.lengths
        return batch * -(-max(m, n) // PACKED_ROWS)

    def kernel(self) -> CudaKernel:
        """The launches: pack, multiply, with split-K add. For FP16X2 row statistics come first, the fallback last."""
        matrices = operand_macros(self.lengths, self.transposed)
        direct = dict(zip(("DIRECT_A", "DIRECT_B"), map(int, self.direct), strict=True))
        wide_c = {"WIDE_C": math.gcd(2 if self.tile.kind is MmaKind.FP16X2 else 8, self.lengths[2])}
        split = {"SPLITS": self.splits} if self.splits > 1 else {}
        pack_blocks = 2 * self.packed_row_blocks, self.chunks

        def pack(name: str, blocks: int | tuple[int, int], **definitions: int) -> CudaLaunch:
            return self._launch("gemm/pack.cu", name, blocks, PACK_THREADS, {**matrices, **definitions})

        gemm = self._launch(
            "gemm/packed_gemm.cu",
            "packed_gemm",
            min(self.splits * self.tiles, self.target.multiprocessors),
            GEMM_THREADS,
            {"TILE_STAGES": self.tile.stages, **direct, **wide_c, **split},
            self.tile.shared,
        )
        packing = pack("pack_matrices", pack_blocks, **direct, **split)
        if self.tile.kind is not MmaKind.FP16X2:
            packed = (packing,) if self.packed_row_blocks else ()
            second = (split_k_sum(FLOAT32, *self.lengths[:3], self.splits),) if self.splits > 1 else ()
            return CudaKernel((*packed, gemm, *second), self.scratch)
        fma_tile = self.tile.fallback_tile
        statistics = pack("partial_row_stats", pack_blocks), pack("row_stats", self.voting_tiles)
        fallback = self._launch(
            "gemm/fp32_fallback.cu",
            "fp32_fallback",
            self.tiles,
            fma_tile.threads,
            {**matrices, **wide_c, "SHARED_BYTES": fma_tile.shared(4)},
            fma_tile.shared(4),
        )
        return CudaKernel((*statistics, packing, gemm, fallback), self.scratch)

    def _launch(
        self,
        file: str,
        name: str,
        blocks: int | tuple[int, int],
        threads: int,
        definitions: Mapping[str, int],
        shared: int = 0,
    ) -> CudaLaunch:
        return CudaLaunch(
            file,
            name,
            self.lengths,
            (FLOAT32,),
            blocks=blocks,
            threads=threads,
            shared=shared,
            definitions={"MMA_KIND": int(self.tile.kind), "TILE_N": self.tile.n, **definitions},
            layouts=(self.scratch,),
        )
