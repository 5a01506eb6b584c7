"""The CUDA kernels for matrix products: the candidates, and device functions for products inside other kernels.

Where a length is small, products have no tiles: a short K or many small matrices (`gemm/short_gemm.cu`), and a matrix
by a vector (`gemm/gemv.cu`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adtrain.core.kernel import TENSOR_CORES, WARP, CudaKernel, CudaLaunch, Target, register
from adtrain.core.precision import FULL
from adtrain.lowering.cuda.gemm import bfloat16
from adtrain.lowering.cuda.gemm.bf16x3 import Bf16x3Gemm, Bf16x3Tile
from adtrain.lowering.cuda.gemm.cost_model import TILED, AnyTile, product_cycles, ranked
from adtrain.lowering.cuda.gemm.packed import PackedGemm, PackedTile
from adtrain.lowering.cuda.gemm.tiles import MAX_LENGTH, MmaKind, SmallTile, Tile, transposes, with_split_k
from adtrain.lowering.shapes import product_lengths

MAX_CANDIDATES = 12
"""Candidates for one product, without gemv."""
MANY_MEMBERS = 256
"""The number of members for which tiles are chosen in a Program by member."""
SHARED_LENGTH = 128
"""M and N for which tiles are chosen if the rows of all members are one matrix."""
MAX_MEMBER_K = 256
"""The largest K for which they are small tiles."""
MEMBER_TILES = {
    (16, 16): (16, 16, 16, 16, 4, 2, 24),
    (16, 32): (16, 32, 16, 32, 4, 2, 17),
    (16, 64): (16, 64, 16, 32, 4, 2, 17),
    (32, 16): (32, 16, 32, 16, 4, 2, 16),
    (32, 32): (32, 32, 32, 32, 2, 2, 17),
    (32, 64): (32, 64, 32, 32, 2, 2, 17),
    (64, 16): (64, 16, 32, 16, 4, 2, 16),
    (64, 32): (64, 32, 32, 32, 1, 2, 17),
    (64, 64): (64, 64, 32, 32, 1, 2, 17),
}
"""Arguments of `SmallTile` by the rows and columns of a result, up to 64: the fastest measured with epilogues."""
WIDE_MEMBER_TILE, MIN_WIDE = (32, 128, 32, 32, 1, 2, 17), 128
"""Arguments of `SmallTile` for a weight gradient, of a product whose member is a dimension of the grid; its minimum
columns. The epilogue reads and writes 512 neighbouring bytes of weights and optimizer state."""
LONG_MEMBER_TILE = (32, 32, 32, 32, 4, 2, 17)
"""Arguments of `SmallTile` for a longer K, of a product whose member is a dimension of the grid."""
MAX_TINY = 8
"""The largest M, N and K of small matrices. A thread has N sums in registers."""
MIN_BATCH = 1 << 12
"""Minimum of small matrices. Other kernels have a thread block for each, of which most threads have no work."""
MAX_SHORT_K = 16
"""The largest K of other products by `gemm/short_gemm.cu`. A thread holds K vectors of B in registers."""
MIN_SHORT = 1 << 18
"""Minimum elements of their result, which is then bound by memory traffic."""
SHORT_THREADS, SHORT_ROWS, MIN_SHORT_THREADS = 128, (4, 2, 1), 1 << 15
"""Threads of a block; rows of a thread; minimum threads if they have several rows."""
SHORT_BYTES_PER_CYCLE = 2000
"""Bytes that a GPU moves in a cycle for them."""
GEMV_THREADS = {False: 256, True: 1024}
"""Threads of a block of `gemm/gemv.cu`, by whether it reads the matrix along its columns (COLUMNS)."""
GEMV_COLUMN_LANES = 8
"""Threads of a row in a block of `gemm/gemv.cu` that reads along columns."""
MAX_COLUMN_K = 1 << 13
"""The largest K for which gemv by few columns is preferred. It took 181 us for (20, 100000) by (100000, 1)."""


@dataclass(frozen=True)
class BlockGemm:
    """A matrix product by a device function that each block calls, as a launch of its own or inside another kernel.

    Attributes:
        lengths: batch, M, N and K.
        splits: of K (split-K).
        transposed: whether A and B are.
    """

    lengths: tuple[int, int, int, int]
    dtype: np.dtype
    tile: Tile | SmallTile
    splits: int
    transposed: tuple[bool, bool]

    @property
    def small(self) -> bool:
        return isinstance(self.tile, SmallTile)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def header(self) -> str:
        """The header of the device function."""
        return "gemm/small_gemm.cuh" if self.small else "gemm/gemm.cuh"

    @property
    def call(self) -> str:
        """The device function with all template arguments but the type of the epilogue."""
        transposed = (str(t).lower() for t in self.transposed)
        name = "small_gemm_block" if self.small else "gemm_block"
        return f"{name}<{', '.join((self.tile.cuda_type(self.shared), *transposed, *map(str, self.widths)))}>"

    @property
    def widths(self) -> tuple[int, int, int]:
        """Elements per load of A and B, and per store of C (WIDE_A, WIDE_B, WIDE_C)."""
        _, m, n, k = self.lengths
        transpose_a, transpose_b = self.transposed
        widest = 16 // self.itemsize
        along_k = 1 if self.tile.kind is MmaKind.FMA else math.gcd(widest, k)  # FMA panels are transposed while loading
        return (
            math.gcd(widest, m) if transpose_a else along_k,
            along_k if transpose_b else math.gcd(widest, n),
            self.tile.store_width(self.itemsize, n),
        )

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        if isinstance(self.tile, Tile):
            return self.tile.shared(self.itemsize)
        staged = self.transposed == (True, False) and self.widths[:2] == (4, 4)  # as small_gemm_block decides
        return self.tile.shared(self.itemsize, staged)

    @property
    def blocks(self) -> tuple[int, int]:
        """The grid: tiles of all matrices, and splits."""
        batch, m, n, _ = self.lengths
        return batch * -(-m // self.tile.m) * -(-n // self.tile.n), self.splits

    @property
    def definitions(self) -> Mapping[str, int]:
        """The macros of `gemm/gemm.cu` or `gemm/small_gemm.cu`."""
        widths = {f"WIDE_{x}": w for x, w in zip("ABC", self.widths, strict=True)}
        split = {} if self.small else {"SPLIT": int(self.splits > 1)}
        return {
            **self.tile.definitions(),
            **transposes(self.transposed),
            **widths,
            **split,
            "SHARED_BYTES": self.shared,
        }

    def kernel(self) -> CudaKernel:
        """The product alone, and with split-K the sum of the splits."""
        product = CudaLaunch(
            "gemm/small_gemm.cu" if self.small else "gemm/gemm.cu",
            "small_gemm" if self.small else "gemm_tiled",
            self.lengths if self.small else (*self.lengths, self.splits),
            (self.dtype,),
            blocks=self.blocks,
            threads=self.threads,
            shared=self.shared,
            definitions=self.definitions,
        )
        return with_split_k(product, self.dtype, *self.lengths[:3], self.splits)


def gemms(
    target: Target, a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL
) -> Sequence[BlockGemm | PackedGemm | Bf16x3Gemm]:
    """The products of arrays of these types, the fastest by estimate first; none if a length is too large."""
    lengths, transposed = product_lengths(a, b, transpose_a, transpose_b), (transpose_a, transpose_b)
    if max(lengths[1:]) > MAX_LENGTH:
        return []
    if target.by_member:
        return [_by_member(target, a, lengths, transposed, precision)]
    found = ranked(a.dtype.itemsize, *lengths, target, precision, k_major=(not transpose_a, transpose_b))

    def gemm(tile: AnyTile, splits: int) -> BlockGemm | PackedGemm | Bf16x3Gemm:
        if isinstance(tile, PackedTile):
            return PackedGemm(target, lengths, tile, transposed, splits)
        if isinstance(tile, Bf16x3Tile):
            return Bf16x3Gemm(target, lengths, tile, splits, transposed)
        return BlockGemm(lengths, a.dtype, tile, splits, transposed)

    return [gemm(*choice) for choice in found[:MAX_CANDIDATES]]


def _by_member(
    target: Target, a: Any, lengths: tuple[int, int, int, int], transposed: tuple[bool, bool], precision: str
) -> BlockGemm | Bf16x3Gemm:
    """The product of a Program by member: the choice depends on M, N and K only, and K is not split among blocks.

    With a short K the epilogue takes most of the time, so small tiles come first, of which a multiprocessor holds many.
    The rows of a product without a batch may be those of all members.
    """
    _, m, n, k = lengths
    if len(a.shape) == 2:
        m = n = SHARED_LENGTH
    plain = target._replace(by_member=False)
    if a.dtype.itemsize == 4 and target.capability >= TENSOR_CORES and precision == FULL and k <= MAX_MEMBER_K:
        rows, columns = (next((x for x in (16, 32) if length <= x), 64) for length in (m, n))
        small = SmallTile(*MEMBER_TILES[rows, columns]).for_k(k)
        return BlockGemm(lengths, a.dtype, small, 1, transposed)
    k_major = not transposed[0], transposed[1]
    found = ranked(a.dtype.itemsize, MANY_MEMBERS, m, n, k, plain, precision, k_major=k_major)
    tile = next(tile for tile, _ in found if not isinstance(tile, PackedTile))  # which looks at the numbers of others
    if isinstance(tile, Bf16x3Tile):
        return Bf16x3Gemm(target, lengths, tile, 1, transposed)
    return BlockGemm(lengths, a.dtype, tile, 1, transposed)


def member_gemms(
    target: Target, a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL
) -> Sequence[BlockGemm]:
    """The product of one member inside a kernel that has the members as a dimension of its grid.

    The first is preferred; small tiles follow with other numbers of threads, so that several products can have one.
    """
    lengths, transposed = product_lengths(a, b, transpose_a, transpose_b), (transpose_a, transpose_b)
    _, m, n, k = lengths
    if max(m, n, k) > MAX_LENGTH:
        return []
    if a.dtype.itemsize == 4 and target.capability >= TENSOR_CORES and precision == FULL:
        rows, columns = (next((x for x in (16, 32) if length <= x), 64) for length in (m, n))
        arguments = MEMBER_TILES[rows, columns] if k <= MAX_MEMBER_K else LONG_MEMBER_TILE
        if transposed == (True, False) and rows == 64 and n >= MIN_WIDE and k <= MAX_MEMBER_K:
            arguments = WIDE_MEMBER_TILE
        preferred = SmallTile(*arguments)
        tiles = [preferred, *(replace(preferred, slices=slices) for slices in (1, 2, 4, 8))]
        return [BlockGemm(lengths, a.dtype, tile.for_k(k), 1, transposed) for tile in dict.fromkeys(tiles)]
    plain, k_major = target._replace(by_member=False), (not transpose_a, transpose_b)
    found = ranked(a.dtype.itemsize, MANY_MEMBERS, m, n, k, plain, precision, k_major=k_major)
    tile = next(tile for tile, _ in found if isinstance(tile, (Tile, SmallTile)))
    return [BlockGemm(lengths, a.dtype, tile, 1, transposed)]


def block_gemms(
    target: Target, a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL
) -> Sequence[BlockGemm]:
    """Those of `gemms` that can be part of another kernel."""
    return [x for x in gemms(target, a, b, transpose_a, transpose_b, precision) if isinstance(x, BlockGemm)]


def has_tiny_matrices(lengths: Sequence[int]) -> bool:
    """Whether there are many matrices, all of them small."""
    batch, *others = lengths
    return batch >= MIN_BATCH and 0 < min(others) <= max(others) <= MAX_TINY


def has_short_k(lengths: Sequence[int]) -> bool:
    """Whether the epilogue of a product moves so much that the product should take no time beside it."""
    batch, m, n, k = lengths
    return 0 < k <= MAX_SHORT_K and batch * m * n >= MIN_SHORT


def short_gemm(lengths: Sequence[int], dtype: np.dtype, transposed: tuple[bool, bool]) -> CudaKernel:
    batch, m, n, k = lengths
    wide_k, wide_c = (math.gcd(x, 16 // dtype.itemsize) for x in (k, n))
    columns = n if n <= MAX_TINY else wide_c
    of_rows = batch * m * n // columns  # threads, if each has one row
    rows = next(x for x in SHORT_ROWS if x == 1 or (m % x == 0 and of_rows >= x * MIN_SHORT_THREADS and n > MAX_TINY))
    threads = of_rows // rows
    launch = CudaLaunch(
        "gemm/short_gemm.cu",
        "short_gemm",
        (threads,),
        (dtype,),
        blocks=-(-threads // SHORT_THREADS),
        threads=SHORT_THREADS,
        definitions={
            **{"LENGTH_M": m, "LENGTH_N": n, "LENGTH_K": k, "ROWS": rows, "COLUMNS": columns},
            **{"WIDE_K": wide_k, "WIDE_C": wide_c},
            **transposes(transposed),
        },
    )
    moved = 2 * batch * m * n * dtype.itemsize
    return CudaKernel((launch,), cycles=TILED.start + moved / SHORT_BYTES_PER_CYCLE)


def gemv(lengths: Sequence[int], dtype: np.dtype, transposed: tuple[bool, bool]) -> CudaKernel:
    batch, m, n, k = lengths
    matrix_b = n != 1
    length = n if matrix_b else m
    columns = (not transposed[1]) if matrix_b else transposed[0]
    width = math.gcd(16 // dtype.itemsize, length if columns else k)
    threads = GEMV_THREADS[columns]
    per_block = GEMV_COLUMN_LANES * width if columns else threads // WARP  # elements of the result
    launch = CudaLaunch(
        "gemm/gemv.cu",
        "gemv",
        (batch, length, k),
        (dtype,),
        blocks=-(-length // per_block) * batch,
        threads=threads,
        definitions={"COLUMNS": int(columns), "MATRIX_B": int(matrix_b), "WIDE_A": width},
    )
    return CudaKernel((launch,))


def candidates(
    target: Target, a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL
) -> Sequence[CudaKernel]:
    """The rule of `matmul`. Without rounding two kernels come before `gemms`: `short_gemm` for many small matrices or a
    short K, and gemv for a matrix by a vector."""
    full = precision == FULL or a.dtype.itemsize == 8
    lengths, transposed = product_lengths(a, b, transpose_a, transpose_b), (transpose_a, transpose_b)
    short = full and not target.by_member and (has_tiny_matrices(lengths) or has_short_k(lengths))
    exact = [short_gemm(lengths, a.dtype, transposed)] if short else []
    vector = [gemv(lengths, a.dtype, transposed)] if full and 1 in lengths[1:3] else []
    few_blocks = [x for x in vector if lengths[3] > MAX_COLUMN_K and _has_few_blocks(x.launches[0], target)]
    exact += [x for x in vector if x not in few_blocks]
    k_major = not transpose_a, transpose_b

    def kernel(gemm: BlockGemm | PackedGemm | Bf16x3Gemm) -> CudaKernel:
        cycles = product_cycles(gemm.tile, gemm.splits, a.dtype.itemsize, lengths, target, k_major)
        return replace(gemm.kernel(), cycles=cycles)

    found = gemms(target, a, b, transpose_a, transpose_b, precision)
    return [*exact, *map(kernel, found), *few_blocks]


def _has_few_blocks(gemv: CudaLaunch, target: Target) -> bool:
    """Whether a matrix by columns occupies less than an eighth of the GPU: `gemv` does not divide K among blocks."""
    assert isinstance(gemv.blocks, int)
    return bool(gemv.definitions["COLUMNS"]) and 8 * gemv.blocks < target.multiprocessors


def _integers(target: Target, a: Any, b: Any) -> list[CudaKernel]:
    lengths = batch, m, n, _ = product_lengths(a, b)
    launch = CudaLaunch("gemm/matmul_integers.cu", "matmul_integers", lengths, (a.dtype,), elements=batch * m * n)
    return [CudaKernel((launch,))]


register("matmul", "cuda", candidates)
register("matmul_bfloat16", "cuda", bfloat16.candidates)
register("matmul_integers", "cuda", _integers)
