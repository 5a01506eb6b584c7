"""The CUDA kernels for matrix products: engines of `kernels/cuda` with tunables, k whole or cut into parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adtrain.core.chip import CHIP, Chip
from adtrain.core.kernel import LegacyKernel
from adtrain.core.target import Target
from adtrain.lowering.cuda.gemm.bf16x3 import Cut, PieceProduct
from adtrain.lowering.cuda.gemm.cost_model import Engine, ranked
from adtrain.lowering.cuda.gemm.packed import SlabProduct, Slabs
from adtrain.lowering.cuda.gemm.split_k import sum_splits
from adtrain.lowering.cuda.gemm.tiles import Direct, Tile, Unit

MOST = 12
"""Candidates for one product."""
VECTOR_THREADS = {False: 256, True: 1024}
"""Threads of a block of `gemm/gemv.cu`, by whether the matrix is read along its columns."""


@dataclass(frozen=True)
class Product:
    """A matrix product by an engine, as a launch of its own or a part of another kernel.

    Attributes:
        lengths: batch, M, N and K.
        tile: the tunables.
        parts: into how many parts K is cut.
        transposed: whether A and B are.
    """

    lengths: tuple[int, int, int, int]
    itemsize: int
    tile: Tile | Direct
    parts: int
    transposed: tuple[bool, bool]

    @property
    def direct(self) -> bool:
        return isinstance(self.tile, Direct)

    @property
    def header(self) -> str:
        """Where the engine's function is."""
        return "gemm/small_gemm.cuh" if self.direct else "gemm/gemm.cuh"

    @property
    def call(self) -> str:
        """The engine's function, with all template arguments but the type of the epilogue."""
        transposed = (str(t).lower() for t in self.transposed)
        name = "direct_block" if self.direct else "gemm_block"
        return f"{name}<{', '.join((self.tile.text, *transposed, *map(str, self.wide)))}>"

    @property
    def wide(self) -> tuple[int, int, int]:
        """Elements that may be read at once of A and B in memory, and written of C (WIDE_A, WIDE_B, WIDE_C)."""
        _, m, n, k = self.lengths
        transpose_a, transpose_b = self.transposed
        widest = 16 // self.itemsize
        turned = 1 if self.tile.unit is Unit.FUSED else math.gcd(widest, k)  # panels that are transposed on the way
        return (
            math.gcd(widest, m) if transpose_a else turned,
            turned if transpose_b else math.gcd(widest, n),
            self.tile.columns_at_once(self.itemsize, n),
        )

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        if isinstance(self.tile, Tile):
            return self.tile.shared(self.itemsize)
        copied = self.transposed == (True, False) and self.wide[:2] == (4, 4)  # as `gemm/small_gemm.cuh` decides
        return self.tile.shared(self.itemsize, copied)

    @property
    def blocks(self) -> tuple[int, int]:
        """Tiles in all matrices, and parts."""
        batch, m, n, _ = self.lengths
        return batch * -(-m // self.tile.m) * -(-n // self.tile.n), self.parts

    @property
    def definitions(self) -> Mapping[str, int]:
        """The macros of `gemm/gemm.cu` or `gemm/small_gemm.cu`."""
        flags = {f"TRANSPOSE_{x}": int(t) for x, t in zip("AB", self.transposed, strict=True)}
        wide = {f"WIDE_{x}": w for x, w in zip("ABC", self.wide, strict=True)}
        split = {} if self.direct else {"SPLIT": int(self.parts > 1)}
        return {**self.tile.definitions(), **flags, **wide, **split}

    def kernel(self) -> LegacyKernel:
        """The launch of the product alone."""
        whole = LegacyKernel(
            "gemm/small_gemm.cu" if self.direct else "gemm/gemm.cu",
            "gemm_direct" if self.direct else "gemm_tiled",
            lambda *_, **__: self.lengths if self.direct else (*self.lengths, self.parts),
            blocks=lambda *_, **__: self.blocks,
            threads=lambda *_, **__: self.threads,
            shared=lambda *_, **__: self.shared,
            definitions=lambda *_, **__: self.definitions,
        )
        if self.parts == 1:
            return whole
        batch, m, n, _ = self.lengths
        size = batch * m * n
        return replace(
            whole,
            scratch=lambda *_, **__: self.parts * size * self.itemsize,
            then=sum_splits(size, m, n, self.parts),
        )


def _lengths(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> tuple[int, int, int, int]:
    """Batch, M, N and K."""
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    return math.prod(a.shape[:-2]), m, b.shape[-2 if transpose_b else -1], k


def engines(
    a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = "full"
) -> Sequence[Product | SlabProduct | PieceProduct]:
    """The product of arrays of these types in each way that the GPU at hand can compute it, the rule's choice first."""
    lengths, transposed = _lengths(a, b, transpose_a, transpose_b), (transpose_a, transpose_b)
    chip = Chip(CHIP.multiprocessors, CHIP.capability)
    found = ranked(a.dtype.itemsize, *lengths, chip, precision, along=(not transpose_a, transpose_b))

    def engine(tile: Engine, parts: int) -> Product | SlabProduct | PieceProduct:
        if isinstance(tile, Slabs):
            return SlabProduct(lengths, tile, transposed)
        if isinstance(tile, Cut):
            return PieceProduct(lengths, tile, parts, transposed)
        return Product(lengths, a.dtype.itemsize, tile, parts, transposed)

    return [engine(*choice) for choice in found[:MOST]]


def products(
    target: Target, a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = "full"
) -> Sequence[Product]:
    """Those of `engines` that one kernel computes, which may stand in a kernel with others."""
    CHIP.multiprocessors, CHIP.capability = target.multiprocessors, target.capability
    found = engines(a, b, transpose_a, transpose_b, precision)
    return [product for product in found if isinstance(product, Product)]


def GEMM(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = "full") -> Sequence[LegacyKernel]:
    """The candidates: a matrix by a vector has one of its own, before those of `engines`."""
    exact = precision == "full" or a.dtype.itemsize == 8
    _, m, n, _ = _lengths(a, b, transpose_a, transpose_b)
    vector = [_vector(a, b, transpose_a, transpose_b)] if exact and 1 in (m, n) else []
    return [*vector, *(product.kernel() for product in engines(a, b, transpose_a, transpose_b, precision))]


def _vector(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> LegacyKernel:
    batch, m, n, k = _lengths(a, b, transpose_a, transpose_b)
    matrix_b = n != 1
    length = n if matrix_b else m
    columns = (not transpose_b) if matrix_b else transpose_a
    wide = math.gcd(16 // a.dtype.itemsize, length if columns else k)
    threads = VECTOR_THREADS[columns]
    each = 8 * wide if columns else threads // 32  # elements of the result that a block computes
    return LegacyKernel(
        "gemm/gemv.cu",
        "gemv",
        lambda *_, **__: (batch, length, k),
        blocks=lambda *_, **__: (-(-length // each), batch),
        threads=lambda *_, **__: threads,
        definitions=lambda *_, **__: {"COLUMNS": int(columns), "MATRIX_B": int(matrix_b), "WIDE_A": wide},
    )
