"""The rule that picks a tile for a matrix product on the GPU; it needs none."""

from __future__ import annotations

import pytest

from adtrain.ops.tiles_cuda import TILES, WINDOW_TILES, Tile, choose

ALL = [(size, tile) for tiles in (TILES, WINDOW_TILES) for size, several in tiles.items() for tile in several]


@pytest.mark.parametrize(("itemsize", "tile"), ALL)
def test_every_tile_fits_the_smallest_supported_gpu(itemsize: int, tile: Tile) -> None:
    assert tile.threads * tile.blocks <= 1024
    assert tile.shared(itemsize) <= 64 << 10


@pytest.mark.parametrize(("itemsize", "tile"), ALL)
def test_every_thread_makes_the_same_number_of_copies(itemsize: int, tile: Tile) -> None:
    at_once = 1 if tile in WINDOW_TILES[itemsize] else 16 // itemsize
    copies = tile.threads * at_once
    assert tile.k * tile.m % copies == tile.k * tile.n % copies == 0


@pytest.mark.parametrize("tile", [tile for tiles in WINDOW_TILES.values() for tile in tiles])
def test_threads_keep_to_their_pixels(tile: Tile) -> None:
    assert tile.n % tile.threads == 0


def test_a_long_k_is_cut_only_where_the_result_is_small() -> None:
    assert choose(4, 1, 128, 128, 9216, 132)[1] > 1
    assert choose(4, 1, 8192, 8192, 8192, 132)[1] == 1
    assert choose(4, 1, 128, 128, 9216, 132, cut=False)[1] == 1


def test_few_columns_get_a_small_tile() -> None:
    tile, _ = choose(4, 1, 128, 10, 256, 132)
    assert tile.m * tile.n <= 512


def test_an_empty_product_has_a_tile() -> None:
    assert choose(4, 1, 0, 5, 0, 132)[1] == 1
