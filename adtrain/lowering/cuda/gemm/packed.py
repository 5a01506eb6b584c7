"""Large matrix products on Hopper's matrix units, of operands that are laid out in slabs (`gemm/packed.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel
from adtrain.lowering.cuda.gemm.tiles import TILES, Tile, Unit

CAPABILITY = (9, 0)
"""The compute capability whose instructions the kernels consist of."""
LINES, BYTES = 128, 128 * 128
"""Of a slab."""
LAYOUT_THREADS, THREADS = 256, 384
"""Of a block of `gemm/pack.cu`, and of `gemm/packed_gemm.cu`."""
MOST_K = 1 << 31
KNOWN_BYTES, REST_BYTES, VOTES_BYTES, MAPS_BYTES = 32, 256, 128, 256
"""Of what is known of a line, or measured in a chunk of it (Line, Measured); of a tile's list (Rest); Votes; Maps."""


@dataclass(frozen=True)
class Slabs:
    """Tunables of `kernels/cuda/gemm/packed.cuh`, and of `gemm/packed_gemm.cu`.

    Args:
        unit: TF32, BFLOAT16, or HALVES for float32.
        pieces: numbers that one of an operand becomes, at most (MOST).
        staged: of these, as many as TILE_STAGES stages have room for.
        depth: k of a slab (DEPTH).
        n: columns of a tile (TILE_N).
        stages: stages in shared memory.
        least: K from which on sums of HALVES are as exact as a chain of multiply-adds (`tests/test_gpu_slabs.py`), and
            others may pay.
        moved: bytes that are read and written to lay out an element, where that is done.
        launches: how many there are.
        speed: multiply-adds of a multiprocessor, as a share of the float32 units', measured.
    """

    unit: Unit
    pieces: int
    staged: int
    depth: int
    n: int
    stages: int
    least: int
    moved: int
    launches: int
    speed: float

    m = LINES

    @property
    def across(self) -> int:
        """Slabs of op(B) that a tile takes side by side (ACROSS)."""
        return max(self.n // LINES, 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory, with what it takes to align them."""
        return self.stages * (self.m + self.n) * self.staged * (BYTES // LINES) + 1024

    @property
    def rest(self) -> Tile:
        """The tile of multiply-adds that `gemm/fp32_fallback.cu` has for what is left."""
        return replace(TILES[4][0], n=self.n, warp_n=self.n // 2)

    def direct(self, k: int, along: tuple[bool, bool]) -> tuple[bool, bool]:
        """Whether A and B are brought as they lie and not laid out: ``along`` k, in rows that begin at whole words."""
        whole = self.unit is Unit.TF32 and k % 4 == 0
        return whole and along[0], whole and along[1]

    def suits(self, m: int, n: int, k: int) -> bool:
        return min(m, n) >= LINES and self.least <= k < MOST_K


SLABS: Mapping[str, Sequence[Slabs]] = {
    "full": (
        Slabs(Unit.HALVES, 3, 2, 64, 128, 3, 768, 12, 5, 4.0),
        Slabs(Unit.HALVES, 3, 2, 64, 64, 4, 768, 12, 5, 3.2),
    ),
    "tf32": (
        Slabs(Unit.TF32, 1, 1, 32, 256, 4, 256, 8, 2, 7.0),
        Slabs(Unit.TF32, 1, 1, 32, 128, 6, 256, 8, 2, 5.5),
        Slabs(Unit.TF32, 1, 1, 32, 64, 8, 256, 8, 2, 4.0),
    ),
    "bfloat16": (
        Slabs(Unit.BFLOAT16, 1, 1, 64, 256, 4, 256, 6, 2, 11.5),
        Slabs(Unit.BFLOAT16, 1, 1, 64, 128, 6, 256, 6, 2, 9.0),
        Slabs(Unit.BFLOAT16, 1, 1, 64, 64, 8, 256, 6, 2, 6.5),
    ),
}
"""By precision; tiles of fewer columns spread products that have few tiles over all multiprocessors."""


@dataclass(frozen=True)
class SlabProduct:
    """A matrix product in slabs.

    Attributes:
        lengths: batch, M, N and K.
        transposed: whether A and B are.
    """

    lengths: tuple[int, int, int, int]
    slabs: Slabs
    transposed: tuple[bool, bool]

    @property
    def tiles(self) -> int:
        batch, m, n, _ = self.lengths
        return batch * -(-m // LINES) * -(-n // self.slabs.n)

    @property
    def blocks(self) -> int:
        """Blocks of LINES lines in all operands."""
        batch, m, n, _ = self.lengths
        across = self.slabs.across
        return batch * (-(-m // LINES) + -(-n // (across * LINES)) * across)

    @property
    def direct(self) -> tuple[bool, bool]:
        """Whether A and B are not laid out."""
        transpose_a, transpose_b = self.transposed
        return self.slabs.direct(self.lengths[-1], (not transpose_a, transpose_b))

    @property
    def laid(self) -> int:
        """Blocks of LINES lines that are laid out."""
        batch, m, _, _ = self.lengths
        left = batch * -(-m // LINES)
        direct_a, direct_b = self.direct
        return (0 if direct_a else left) + (0 if direct_b else self.blocks - left)

    @property
    def depth(self) -> int:
        """Slabs along k."""
        return -(-self.lengths[-1] // self.slabs.depth)

    @property
    def chunks(self) -> int:
        """Into how many parts k is cut for `gemm/pack.cu` (CHUNKS, CHUNK)."""
        return min(-(-self.depth // 2), 16)

    @property
    def scratch(self) -> int:
        """Bytes of scratch: the slabs, and of HALVES what is known of lines and tiles (`Slabs` in gemm/packed.cuh)."""
        slabs = self.laid * self.depth * self.slabs.pieces * BYTES
        if self.slabs.unit is not Unit.HALVES:
            return slabs + CHIP.multiprocessors * MAPS_BYTES
        lines = self.blocks * LINES * KNOWN_BYTES * (1 + self.chunks)
        return slabs + lines + self.tiles * REST_BYTES + VOTES_BYTES

    @property
    def asked(self) -> int:
        """Tiles that `know_lines` asks (Slabs::asked, of all matrices)."""
        batch, m, n, _ = self.lengths
        return batch * -(-max(m, n) // LINES)

    def kernel(self) -> LegacyKernel:
        """The launches: operands to slabs, of HALVES once they are known; products; of HALVES what is left."""
        _, m, n, k = self.lengths
        turned = dict(zip(("TRANSPOSE_A", "TRANSPOSE_B"), map(int, self.transposed), strict=True))
        direct = dict(zip(("DIRECT_A", "DIRECT_B"), map(int, self.direct), strict=True))
        transpose_a, transpose_b = self.transposed
        wide = {"WIDE_A": math.gcd(4, m if transpose_a else k), "WIDE_B": math.gcd(4, k if transpose_b else n)}
        wide_c = {"WIDE_C": math.gcd(2, n)}

        layout = (2 * self.laid, self.chunks)
        fill = self._step("gemm/pack.cu", "fill_slabs", layout, LAYOUT_THREADS, {**turned, **wide, **direct})
        stages = {"TILE_STAGES": self.slabs.stages, **direct}
        blocks = min(self.tiles, CHIP.multiprocessors)
        multiply = self._step(
            "gemm/packed_gemm.cu", "gemm_slabs", blocks, THREADS, {**stages, **wide_c}, self.slabs.shared
        )
        if self.slabs.unit is Unit.HALVES:
            macros, plain = {**turned, **wide, **wide_c}, self.slabs.rest
            rest = self._step("gemm/fp32_fallback.cu", "gemm_rest", self.tiles, plain.threads, macros, plain.shared(4))
            fill = replace(fill, then=replace(multiply, then=rest))
            know = self._step("gemm/pack.cu", "know_lines", self.asked, LAYOUT_THREADS, {**turned, **wide}, then=fill)
            first = self._step("gemm/pack.cu", "measure_lines", layout, LAYOUT_THREADS, {**turned, **wide}, then=know)
        else:
            first = replace(fill, then=multiply) if self.laid else multiply
        return replace(first, scratch=lambda *_, **__: self.scratch)

    def _step(
        self,
        file: str,
        name: str,
        blocks: int | tuple[int, int],
        threads: int,
        macros: Mapping[str, int],
        shared: int = 0,
        then: LegacyKernel | None = None,
    ) -> LegacyKernel:
        return LegacyKernel(
            file,
            name,
            lambda *_, **__: self.lengths,
            blocks=lambda *_, **__: blocks,
            threads=lambda *_, **__: threads,
            shared=lambda *_, **__: shared,
            definitions=lambda *_, **__: {
                "UNIT": int(self.slabs.unit),
                "TILE_N": self.slabs.n,
                **macros,
            },
            then=then,
        )
