"""Matrix products on Hopper's matrix units that cut operands in pieces on the way (`gemm/gemm_bf16x3.cu`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel, no_bytes
from adtrain.lowering.cuda.gemm.split_k import sum_splits

PIECES, GROUP, WORD = 3, 8, 16
"""Numbers that a float32 becomes; neighbours of a word, and its bytes."""
ROWS, DEPTH, STAGES = 128, 32, 3
"""Rows of a tile (TILE_M); k of a stage, and how many there are."""
THREADS, BRINGING = 512, 256
"""Of a block; those that bring operands."""
LEAST = 64
"""Rows, columns and length of sums from which on tiles are filled."""
MOST_ELEMENTS = 1 << 30
"""Of a matrix, at most, so that 32 bits count them, beyond its end as well."""
WIDTHS = (64, 72, 80, 88, 96, 128)
"""Columns that a tile may have (TILE_N): between the last ones more of them take no longer."""
MOST_PARTS = 128
START, TILE_END = 6000, 3000
"""Cycles of the launch, until a block has its first stages; of a tile's end."""
SPEED, BROUGHT = 1850, 3.7
"""Multiply-adds of bfloat16, and elements brought and cut, in a cycle of a multiprocessor, measured."""
EVEN, UNEVEN = (64, 128), 1.15
"""Columns whose words are dealt out evenly, and how many times as long those of others take."""
WARP = 32
"""Words of a stage are dealt out by so many."""
SECOND_PASS, BYTES_PER_CYCLE = 3500, 3000
"""Cycles of the launch that adds up parts, and what is written and read in one of them."""


@dataclass(frozen=True)
class Cut:
    """Tunables of `gemm/gemm_bf16x3.cu`.

    Args:
        n: columns of a tile (TILE_N).
    """

    n: int

    m = ROWS

    def tiles(self, batch: int, m: int, n: int) -> int:
        """Of the results."""
        return batch * -(-m // ROWS) * -(-n // self.n)

    def cycles(self, batch: int, m: int, n: int, k: int, parts: int) -> float:
        """An estimate of the time of ``batch`` products of m x k and k x n matrices, k cut into parts."""
        multiplied = ROWS * self.n * DEPTH * 6 / SPEED
        words = sum(-(-lines * DEPTH // GROUP // WARP) * WARP for lines in (ROWS, self.n))
        brought = words * GROUP / BROUGHT * (1 if self.n in EVEN else UNEVEN)
        rounds = -(-self.tiles(batch, m, n) * parts // CHIP.multiprocessors)
        stages = -(-k // DEPTH)
        whole = START + rounds * (TILE_END + -(-stages // parts) * max(multiplied, brought))
        if parts == 1:
            return whole
        return whole + SECOND_PASS + 2 * parts * batch * m * n * 4 / BYTES_PER_CYCLE


def cuts(batch: int, m: int, n: int, k: int) -> Sequence[tuple[Cut, int]]:
    """The fastest by estimate, and into how many parts k is cut; and the fastest that does not cut it."""
    if min(m, n, k) < LEAST or max(m, n) * k >= MOST_ELEMENTS:
        return []
    stages = -(-k // DEPTH)
    parts = {-(-stages // each) for each in range(1, stages + 1)}

    def best(parts: Iterable[int]) -> tuple[Cut, int]:
        ways = ((Cut(width), count) for width in WIDTHS for count in parts)
        return min(ways, key=lambda way: way[0].cycles(batch, m, n, k, way[1]))

    return list(dict.fromkeys([best(sorted(count for count in parts if count <= MOST_PARTS)), best([1])]))


@dataclass(frozen=True)
class PieceProduct:
    """A matrix product in pieces.

    Attributes:
        lengths: batch, M, N and K.
        cut: the tunables.
        parts: into how many K is cut.
        transposed: whether A and B are.
    """

    lengths: tuple[int, int, int, int]
    cut: Cut
    parts: int
    transposed: tuple[bool, bool]

    @property
    def tiles(self) -> int:
        return self.cut.tiles(*self.lengths[:3])

    @property
    def wide(self) -> Mapping[str, int]:
        """Elements that may be read at once of A and B in memory, and written of C."""
        _, m, n, k = self.lengths
        transpose_a, transpose_b = self.transposed
        return {
            "WIDE_A": math.gcd(4, m if transpose_a else k),
            "WIDE_B": math.gcd(4, k if transpose_b else n),
            "WIDE_C": math.gcd(2, n),
            "WIDE_TILE": math.gcd(4, n),
        }

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the stages, and elements on their way or, later, the tile."""
        stages = slots = 0
        for lines, along in ((ROWS, not self.transposed[0]), (self.cut.n, self.transposed[1])):
            across, down = (DEPTH // GROUP, lines) if along else (lines // GROUP, DEPTH)
            words = -(-across * down // BRINGING) * BRINGING
            stages += STAGES * PIECES * across * (down + (2 if along else 1)) * WORD
            slots += 2 * words * GROUP * 4
        return stages + max(slots, ROWS * (self.cut.n + 4) * 4)

    def kernel(self) -> LegacyKernel:
        """The launch, and the one that adds up the parts."""
        batch, m, n, _ = self.lengths
        size = batch * m * n
        definitions = {
            **{f"TRANSPOSE_{x}": int(t) for x, t in zip("AB", self.transposed, strict=True)},
            **self.wide,
            "TILE_N": self.cut.n,
            "SPLIT": int(self.parts > 1),
            "ONCE": int(self.tiles * self.parts <= CHIP.multiprocessors),
        }
        return LegacyKernel(
            "gemm/gemm_bf16x3.cu",
            "gemm_pieces",
            lambda *_, **__: (*self.lengths, self.parts),
            blocks=lambda *_, **__: min(self.tiles * self.parts, CHIP.multiprocessors),
            threads=lambda *_, **__: THREADS,
            shared=lambda *_, **__: self.shared,
            definitions=lambda *_, **__: definitions,
            scratch=(lambda *_, **__: self.parts * size * 4) if self.parts > 1 else no_bytes,
            then=sum_splits(size, m, n, self.parts) if self.parts > 1 else None,
        )
