"""The rule that picks tiles for products on the GPU; it needs none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.core.chip import CHIP, Chip
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.bf16x3 import Cut
from adtrain.lowering.cuda.gemm.cost_model import LEAST_SHARED, Gathers, ranked, units
from adtrain.lowering.cuda.gemm.matmul import GEMM, MOST, products
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

FUSED = [(size, tile) for tiles in (TILES, WINDOW_TILES) for size, several in tiles.items() for tile in several]
MATRIX = [
    (8 if unit is Unit.DOUBLE else 4, tile)
    for tiles in (MATRIX_TILES, WINDOW_MATRIX_TILES, ELEMENT_MATRIX_TILES)
    for unit, several in tiles.items()
    for tile in several
]
PIXELS = [tile for tiles in (WINDOW_TILES, WINDOW_MATRIX_TILES) for several in tiles.values() for tile in several]
GATHERED = [*PIXELS, *(tile for several in ELEMENT_MATRIX_TILES.values() for tile in several)]
STEPS = {Unit.TF32: 8, Unit.BFLOAT16: 16, Unit.PIECES: 16, Unit.DOUBLE: 8}
PRECISIONS = ("full", "tf32", "bfloat16")
H200 = Chip(132, (9, 0))

lengths = st.integers(0, 5000)


def matrices(m: int, n: int, k: int, ta: bool, tb: bool, dtype: str = "float32") -> tuple[ArrayType, ArrayType]:
    a, b = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    return ArrayType(a, np.dtype(dtype)), ArrayType(b, np.dtype(dtype))


@pytest.mark.parametrize(("itemsize", "tile"), FUSED)
def test_tiles_of_multiply_adds_fit_the_smallest_supported_gpu(itemsize: int, tile: Tile) -> None:
    assert tile.threads * tile.blocks <= 1024
    assert tile.shared(itemsize) <= 64 << 10


@pytest.mark.parametrize(("itemsize", "tile"), FUSED + MATRIX)
def test_every_thread_makes_the_same_number_of_copies(itemsize: int, tile: Tile) -> None:
    at_once = 1 if tile in GATHERED else 16 // itemsize
    copies = tile.threads * at_once
    assert tile.k * tile.m % copies == tile.k * tile.n % copies == 0


@pytest.mark.parametrize(("itemsize", "tile"), MATRIX)
def test_tiles_of_the_matrix_units_are_made_of_instructions(itemsize: int, tile: Tile) -> None:
    assert tile.warp_m % 16 == tile.warp_n % 8 == tile.k // tile.slices % STEPS[tile.unit] == 0
    assert tile.m % tile.warp_m == tile.n % tile.warp_n == tile.k % tile.slices == 0


@pytest.mark.parametrize("unit", MATRIX_TILES)
def test_every_unit_has_a_tile_for_every_gpu_that_has_it(unit: Unit) -> None:
    itemsize = 8 if unit is Unit.DOUBLE else 4
    assert min(tile.shared(itemsize) for tile in MATRIX_TILES[unit]) <= LEAST_SHARED


@pytest.mark.parametrize("tunables", DIRECT)
def test_direct_tiles_fit_without_asking_for_shared_memory(tunables: Any) -> None:
    tile = Direct(*tunables)
    assert tile.threads <= 512
    assert tile.shared(4) <= 48 << 10
    assert tile.shared(4, copied=True) <= LEAST_SHARED


def test_a_direct_tile_has_no_more_units_under_way_than_a_warp_has() -> None:
    tile = Direct(32, 32, 32, 32, 8, 2, 17)
    assert [tile.suited(k).ahead for k in (0, 128, 129, 4096)] == [1, 1, 2, 2]


@pytest.mark.parametrize("tile", PIXELS)
def test_threads_keep_to_their_pixels(tile: Tile) -> None:
    assert tile.n % tile.threads == 0


def test_a_long_k_is_cut_only_where_the_result_is_small() -> None:
    assert ranked(4, 1, 128, 128, 9216, H200)[0][1] > 1
    assert ranked(4, 1, 8192, 8192, 8192, H200)[0][1] == 1
    assert all(parts == 1 for _, parts in ranked(4, 1, 128, 128, 9216, H200, gathers=Gathers.PIXELS))


def test_few_columns_get_a_small_tile() -> None:
    tile, _ = ranked(4, 1, 128, 10, 256, H200)[0]
    assert tile.m * tile.n <= 512


def test_an_a100_multiplies_large_matrices_in_pieces_and_other_gpus_do_not() -> None:
    gpus = (8, 0), (8, 6), (8, 9), (9, 0)
    first = {gpu: ranked(4, 1, 4096, 4096, 4096, Chip(108, gpu))[0][0] for gpu in gpus}
    found = {gpu: tile.unit for gpu, tile in first.items() if not isinstance(tile, Cut)}
    assert found == {(8, 0): Unit.PIECES, (8, 6): Unit.FUSED, (8, 9): Unit.FUSED, (9, 0): Unit.HALVES}


def test_older_gpus_multiply_without_matrix_units_and_refuse_their_precisions() -> None:
    assert units(4, "full", (7, 5)) == units(8, "full", (7, 5)) == (Unit.FUSED,)
    assert units(4, "tf32", (7, 5)) == units(4, "bfloat16", (7, 5)) == ()


def test_float64_is_full_in_every_precision() -> None:
    assert {units(8, precision, (9, 0)) for precision in PRECISIONS} == {(Unit.FUSED, Unit.DOUBLE)}


@given(lengths, lengths, lengths, st.booleans(), st.booleans(), st.sampled_from(PRECISIONS))
def test_candidates_cover_the_result_with_few_different_launches(
    m: int, n: int, k: int, ta: bool, tb: bool, precision: str
) -> None:
    found = products(*matrices(m, n, k, ta, tb), ta, tb, precision)
    assert 1 <= len(found) <= MOST
    assert len({(p.call, p.parts) for p in found}) == len(found)
    for p in found:
        tiles, parts = p.blocks
        assert tiles * p.tile.m * p.tile.n >= m * n
        assert 1 <= parts <= max(1, math.ceil(k / 8))
        assert p.shared <= 227 << 10
        wide_a, wide_b, wide_c = p.wide
        assert (m if ta else k) % wide_a == (k if tb else n) % wide_b == n % wide_c == 0


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_a_matrix_by_a_vector_has_its_own_kernel(ta: bool, tb: bool) -> None:
    for m, n in ((70, 1), (1, 70)):
        assert GEMM(*matrices(m, n, 30, ta, tb), ta, tb)[0].name == "gemv"
        assert GEMM(*matrices(m, n, 30, ta, tb), ta, tb, "tf32")[0].name != "gemv"


def test_the_rule_follows_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHIP, "capability", (7, 5))
    found = products(*matrices(128, 512, 784, False, False), False, False)
    assert {p.tile.unit for p in found} == {Unit.FUSED}
