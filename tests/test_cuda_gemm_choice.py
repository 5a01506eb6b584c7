"""Which kernels and tiles are chosen for matrix products on a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.backends.cuda import H200
from adtrain.core.kernel import Target
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm import MAX_CANDIDATES, MAX_COLUMN_K, block_gemms, candidates
from adtrain.lowering.cuda.gemm.bf16x3 import Bf16x3Tile
from adtrain.lowering.cuda.gemm.cost_model import Gathers, mma_kinds, ranked
from adtrain.lowering.cuda.gemm.tiles import (
    ELEMENT_MMA_TILES,
    FMA_TILES,
    MMA_TILES,
    PIXEL_FMA_TILES,
    PIXEL_MMA_TILES,
    SMALL_TILES,
    MmaKind,
    SmallTile,
    Tile,
)

FMA = [(size, tile) for tiles in (FMA_TILES, PIXEL_FMA_TILES) for size, several in tiles.items() for tile in several]
MMA = [
    (8 if kind is MmaKind.FP64 else 4, tile)
    for tiles in (MMA_TILES, PIXEL_MMA_TILES, ELEMENT_MMA_TILES)
    for kind, several in tiles.items()
    for tile in several
]
PIXELS = [tile for tiles in (PIXEL_FMA_TILES, PIXEL_MMA_TILES) for several in tiles.values() for tile in several]
GATHERED = [*PIXELS, *(tile for several in ELEMENT_MMA_TILES.values() for tile in several)]
MMA_K = {MmaKind.TF32: 8, MmaKind.BFLOAT16: 16, MmaKind.BF16X3: 16, MmaKind.FP64: 8}
PRECISIONS = ("full", "tf32", "bfloat16")
KIBIBYTES = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""Shared memory of a block, by compute capability."""


def target(*capability: int, multiprocessors: int = 108) -> Target:
    major, minor = capability
    return Target((major, minor), multiprocessors, KIBIBYTES[major, minor] << 10)


lengths = st.integers(0, 5000)


def matrices(m: int, n: int, k: int, ta: bool, tb: bool, dtype: str = "float32") -> tuple[ArrayType, ArrayType]:
    a, b = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    return ArrayType(a, np.dtype(dtype)), ArrayType(b, np.dtype(dtype))


@pytest.mark.parametrize(("itemsize", "tile"), FMA)
def test_fma_tiles_fit_the_smallest_supported_gpu(itemsize: int, tile: Tile) -> None:
    assert tile.threads * tile.min_blocks <= 1024
    assert tile.shared(itemsize) <= 64 << 10


@pytest.mark.parametrize(("itemsize", "tile"), FMA + MMA)
def test_every_thread_makes_the_same_number_of_copies(itemsize: int, tile: Tile) -> None:
    width = 1 if tile in GATHERED else 16 // itemsize
    copies = tile.threads * width
    assert tile.k * tile.m % copies == tile.k * tile.n % copies == 0


@pytest.mark.parametrize(("itemsize", "tile"), MMA)
def test_tensor_core_tiles_are_whole_instructions(itemsize: int, tile: Tile) -> None:
    assert tile.warp_m % 16 == tile.warp_n % 8 == tile.k // tile.slices % MMA_K[tile.kind] == 0
    assert tile.m % tile.warp_m == tile.n % tile.warp_n == tile.k % tile.slices == 0


@pytest.mark.parametrize("kind", MMA_TILES)
def test_every_kind_has_a_tile_for_every_gpu_with_tensor_cores(kind: MmaKind) -> None:
    itemsize = 8 if kind is MmaKind.FP64 else 4
    assert min(tile.shared(itemsize) for tile in MMA_TILES[kind]) <= 99 << 10


@pytest.mark.parametrize("arguments", SMALL_TILES)
def test_small_tiles_fit_in_default_shared_memory_unless_staged(arguments: Any) -> None:
    tile = SmallTile(*arguments)
    assert tile.threads <= 512
    assert tile.shared(4) <= 48 << 10
    assert tile.shared(4, staged=True) <= 99 << 10


def test_a_small_tile_prefetches_no_more_k_steps_than_a_warp_has() -> None:
    tile = SmallTile(32, 32, 32, 32, 8, 2, 17)
    assert [tile.for_k(k).prefetch for k in (0, 128, 129, 4096)] == [1, 1, 2, 2]


@pytest.mark.parametrize("tile", PIXELS)
def test_a_thread_always_gathers_the_same_pixels(tile: Tile) -> None:
    assert tile.n % tile.threads == 0


def test_k_is_split_only_where_the_result_is_small() -> None:
    assert ranked(4, 1, 128, 128, 9216, H200)[0][1] > 1
    assert ranked(4, 1, 8192, 8192, 8192, H200)[0][1] == 1
    assert all(splits == 1 for _, splits in ranked(4, 1, 128, 128, 9216, H200, gathers=Gathers.PIXELS))


def test_few_columns_get_a_small_tile() -> None:
    tile, _ = ranked(4, 1, 128, 10, 256, H200)[0]
    assert tile.m * tile.n <= 512


def test_large_float32_products_use_bf16x3_on_an_a100_fp16x2_on_hopper_and_fma_on_other_gpus() -> None:
    first = {gpu: ranked(4, 1, 4096, 4096, 4096, target(*gpu))[0][0] for gpu in KIBIBYTES}
    found = {gpu: tile.kind for gpu, tile in first.items() if not isinstance(tile, Bf16x3Tile)}
    tensor_cores = {(8, 0): MmaKind.BF16X3, (9, 0): MmaKind.FP16X2}
    assert found == {gpu: tensor_cores.get(gpu, MmaKind.FMA) for gpu in KIBIBYTES}


def test_gpus_before_ampere_use_fma_in_every_precision() -> None:
    assert {mma_kinds(itemsize, p, (7, 5)) for itemsize in (4, 8) for p in PRECISIONS} == {(MmaKind.FMA,)}


def test_float64_is_full_in_every_precision() -> None:
    assert {mma_kinds(8, precision, (9, 0)) for precision in PRECISIONS} == {(MmaKind.FMA, MmaKind.FP64)}


@given(lengths, lengths, lengths, st.booleans(), st.booleans(), st.sampled_from(PRECISIONS))
def test_candidates_differ_and_cover_the_result(m: int, n: int, k: int, ta: bool, tb: bool, precision: str) -> None:
    found = block_gemms(H200, *matrices(m, n, k, ta, tb), ta, tb, precision)
    assert 1 <= len(found) <= MAX_CANDIDATES
    assert len({(p.call, p.splits) for p in found}) == len(found)
    for p in found:
        tiles, splits = p.blocks
        assert tiles * p.tile.m * p.tile.n >= m * n
        assert 1 <= splits <= max(1, math.ceil(k / 8))
        assert p.shared <= 227 << 10
        wide_a, wide_b, wide_c = p.widths
        assert (m if ta else k) % wide_a == (k if tb else n) % wide_b == n % wide_c == 0


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_a_matrix_by_a_vector_has_its_own_kernel(ta: bool, tb: bool) -> None:
    for m, n in ((70, 1), (1, 70)):
        full, tf32 = (candidates(H200, *matrices(m, n, 30, ta, tb), ta, tb, x) for x in ("full", "tf32"))
        assert full[0].launches[0].name == "gemv"
        assert tf32[0].launches[0].name != "gemv"


def test_few_columns_of_many_rows_by_a_vector_are_divided_among_blocks() -> None:
    for rows, first in ((MAX_COLUMN_K, "gemv"), (MAX_COLUMN_K + 1, "gemm_tiled")):
        found = candidates(H200, *matrices(20, 1, rows, True, False), True, False, "full")
        assert found[0].launches[0].name == first
    assert found[-1].launches[0].name == "gemv"


def test_tiles_fit_the_target() -> None:
    found = block_gemms(target(7, 5), *matrices(128, 512, 784, False, False), False, False)
    assert {p.tile.kind for p in found} == {MmaKind.FMA}
    for gpu in KIBIBYTES:
        for p in block_gemms(target(*gpu), *matrices(1024, 1024, 1024, False, False), False, False, "full"):
            assert p.shared <= KIBIBYTES[gpu] << 10


@pytest.mark.parametrize("gpu", KIBIBYTES)
def test_a_batch_of_many_small_products_can_be_launched(gpu: tuple[int, int]) -> None:
    """A grid has at most 65,535 blocks in y and z (CUDA C++ Programming Guide)."""
    for m, n in ((4, 1), (1, 4), (4, 4)):
        a, b = (ArrayType((70_000, *x.shape), x.dtype) for x in matrices(m, n, 4, False, False))
        for kernel in candidates(target(*gpu), a, b, False, False):
            for launch in kernel.launches:
                blocks = launch.blocks if isinstance(launch.blocks, tuple) else (launch.blocks, 1)
                assert max(blocks[1:], default=1) <= 65_535, launch.name
