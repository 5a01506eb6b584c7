"""Which tile a product on the GPU is computed with, and into how many parts its k is cut.

The choice is a rule: the smallest estimate of the time, from the shape and the number of multiprocessors; it needs no
GPU, so that what runs is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from typing import TypeAlias

from adtrain.core.chip import Chip
from adtrain.lowering.cuda.gemm.bf16x3 import Cut, cuts
from adtrain.lowering.cuda.gemm.packed import CAPABILITY, SLABS, Slabs
from adtrain.lowering.cuda.gemm.tiles import (
    DIRECT,
    ELEMENT_MATRIX_TILES,
    MATRIX_TILES,
    TILES,
    WINDOW_MATRIX_TILES,
    WINDOW_TILES,
    Direct,
    Tile,
    Unit,
)

Engine: TypeAlias = "Tile | Direct | Slabs | Cut"
"""The tunables of one."""


class Gathers(IntEnum):
    """What of a product's operands is gathered from images: its columns are pixels, or elements of windows."""

    NOTHING = 0
    PIXELS = 1
    ELEMENTS = 2


LANES = 128
"""float32 multiply-adds of a multiprocessor in a cycle."""
A100, A100_LANES = (8, 0), 64
"""The compute capability whose multiprocessors do half as many, and as many products of matrices as others."""
START = 3800
"""Cycles of the launch, until a block has its first stages, and from its last one until the sums are in memory."""
SECOND_PASS, PART, BYTES_PER_CYCLE = 2500, 100, 4000
"""Cycles until the sum of the parts begins and that each part adds, and what it reads and writes in a cycle."""
MOVED_PER_CYCLE = 2000
"""Bytes read and written in a cycle while operands are laid out in slabs."""
DIRECT_SPEED = {Unit.PIECES: 1.0, Unit.TF32: 1.7, Unit.BFLOAT16: 1.8}
"""Of direct products by other units, as a multiple of the speed in pieces."""
AT_ONCE, LATER = 8, 1000
"""Blocks of direct products that a multiprocessor holds at once, and cycles of each later one beside its reads."""
FULL = 4
"""Blocks for each multiprocessor from which on cutting k gains nothing."""
PIECES_K = 256
"""The largest K of panels in pieces, but on an A100: beyond it float32 sums in several slices are as exact and fast."""
PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
SHARED = {(7, 5): 64 << 10, (8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
"""Bytes of shared memory that a block can have, by compute capability."""
LEAST_SHARED = 99 << 10
"""On others."""


def units(itemsize: int, precision: str, capability: tuple[int, int]) -> tuple[Unit, ...]:
    """What may multiply numbers of so many bytes with a precision ("full", "tf32", "bfloat16")."""
    matrix = capability >= (8, 0)
    if itemsize == 8:
        return (Unit.FUSED, Unit.DOUBLE) if matrix else (Unit.FUSED,)
    if precision == "full":
        return (Unit.FUSED, Unit.PIECES) if matrix else (Unit.FUSED,)
    return (Unit.TF32 if precision == "tf32" else Unit.BFLOAT16,) if matrix else ()


@lru_cache(maxsize=4096)
def ranked(
    itemsize: int,
    batch: int,
    m: int,
    n: int,
    k: int,
    chip: Chip,
    precision: str = "full",
    gathers: Gathers = Gathers.NOTHING,
    along: tuple[bool, bool] = (False, False),
) -> Sequence[tuple[Engine, int]]:
    """Tiles and numbers of parts of k for ``batch`` products of m x k and k x n matrices, the best by estimate first.

    Args:
        gathers: what of the operands is gathered from images: then there is no `Direct`, no `Slabs` and no `Cut`, and k
            is whole for pixels.
        along: whether the rows of A and the columns of B lie along k in memory.
    """

    def estimate(tile: Engine, parts: int) -> float:
        blocks = batch * -(-m // tile.m) * -(-n // tile.n) * parts
        rounds = -(-blocks // chip.multiprocessors)
        if isinstance(tile, Direct):
            read = (tile.m * (tile.n // tile.warp_n) + tile.n * (tile.m // tile.warp_m)) * k * itemsize
            later = max(0, rounds - AT_ONCE) * LATER
            return START + rounds * read / (tile.speed * DIRECT_SPEED[tile.unit]) + later
        if isinstance(tile, Cut):
            return tile.cycles(batch, m, n, k, parts)
        if isinstance(tile, Slabs):
            laid = sum(lines for lines, direct in zip((m, n), tile.direct(k, along), strict=True) if not direct)
            layout = batch * laid * k * tile.moved / MOVED_PER_CYCLE
            return (tile.launches if laid else 1) * START + layout + rounds * k * tile.m * tile.n / (LANES * tile.speed)
        share = tile.speed if rounds > 1 else tile.alone
        stages = -(-math.ceil(k / tile.k) // parts)
        lanes = A100_LANES if chip.capability == A100 and tile.unit is Unit.FUSED and itemsize == 4 else LANES
        cycles = START + rounds * stages * tile.k * tile.m * tile.n / (lanes * share)
        if parts > 1:
            cycles += SECOND_PASS + PART * parts + (2 * parts + 1) * batch * m * n * itemsize / BYTES_PER_CYCLE
        return cycles

    def useful(tile: Tile, parts: int) -> bool:
        blocks = batch * -(-m // tile.m) * -(-n // tile.n)
        return parts == 1 or (not pixels and parts * tile.k <= k and blocks <= FULL * chip.multiprocessors)

    pixels = gathers is Gathers.PIXELS
    room = SHARED.get(chip.capability, LEAST_SHARED)
    best: list[tuple[Engine, int]] = []
    for unit in units(itemsize, precision, chip.capability):
        if unit is Unit.FUSED:
            tiles = (WINDOW_TILES if pixels else TILES)[itemsize]
        elif gathers is not Gathers.NOTHING:
            tiles = (WINDOW_MATRIX_TILES if pixels else ELEMENT_MATRIX_TILES).get(unit, ())
        elif unit is Unit.PIECES and k > PIECES_K and chip.capability != A100:
            tiles = ()
        else:
            tiles = [replace(tile, along=along) for tile in MATRIX_TILES[unit]]
        for tile in tiles:
            if tile.shared(itemsize) <= room:
                _, parts = min((estimate(tile, parts), parts) for parts in PARTS if useful(tile, parts))
                best.append((tile, parts))
        if unit not in (Unit.FUSED, Unit.DOUBLE) and gathers is Gathers.NOTHING:
            best += [(Direct(*tunables, unit=unit).suited(k), 1) for tunables in DIRECT]
    on_hopper = (itemsize, chip.capability) == (4, CAPABILITY)
    if on_hopper and gathers is Gathers.NOTHING:
        best += [(slabs, 1) for slabs in SLABS[precision] if slabs.suits(m, n, k)]
        best += cuts(batch, m, n, k) if precision == "full" else ()
    return sorted(best, key=lambda choice: estimate(*choice))
