"""Matrix products of packed operands, without a GPU: choice, launches, and compilation."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import NvrtcLog
from hypothesis import given
from hypothesis import strategies as st

from adtrain.backends.cuda import H200, compiler
from adtrain.backends.cuda.compiler import CudaCompilerError, Source, architecture
from adtrain.backends.cuda.launch_plan import launch_source
from adtrain.core.kernel import HOPPER, Target
from adtrain.core.types import ArrayType
from adtrain.files import asset_path
from adtrain.lowering.cuda.gemm import gemms
from adtrain.lowering.cuda.gemm.cost_model import Gathers, ranked
from adtrain.lowering.cuda.gemm.packed import PACKED_ROWS, PACKED_TILES, STRUCT_BYTES, PackedGemm, PackedTile
from adtrain.lowering.cuda.gemm.tiles import MmaKind

A100 = Target((8, 0), 108, 163 << 10)
B200 = Target((10, 0), 148, 227 << 10)
PRECISIONS = tuple(PACKED_TILES)
TILES = tuple(tile for several in PACKED_TILES.values() for tile in several)

lengths = st.tuples(st.integers(1, 4), *[st.integers(1, 20000)] * 3)


def chosen(m: int, n: int, k: int, precision: str = "full", target: Target = H200) -> list[bool]:
    """Which of the choices, the best first, are packed products."""
    return [isinstance(tile, PackedTile) for tile, _ in ranked(4, 1, m, n, k, target, precision)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_operands_of_large_products_are_packed_and_those_of_small_ones_are_not(precision: str) -> None:
    assert chosen(4096, 4096, 4096, precision)[0]
    assert chosen(4095, 4097, 4091, precision)[0]
    assert not chosen(128, 512, 128, precision)[0]
    assert not chosen(128, 128, 9216, precision)[0]


def test_packed_products_are_for_float32_matrices_on_hopper() -> None:
    assert not any(chosen(4096, 4096, 4096, target=B200))
    assert not any(isinstance(tile, PackedTile) for tile, _ in ranked(8, 1, 4096, 4096, 4096, H200))
    gathered = ranked(4, 1, 4096, 4096, 4096, H200, gathers=Gathers.PIXELS)
    assert not any(isinstance(tile, PackedTile) for tile, _ in gathered)


def test_a_short_k_is_not_computed_in_fp16x2() -> None:
    assert not any(chosen(8192, 8192, PACKED_TILES["full"][0].min_k - 1))


@pytest.mark.parametrize("tile", TILES)
def test_the_pipeline_and_static_shared_memory_fit_a_block(tile: PackedTile) -> None:
    assert tile.shared <= (227 << 10) - (1 + 20 * (tile.kind is not MmaKind.FP16X2) << 10)


def test_the_fallback_launches_as_many_threads_as_its_tile_has() -> None:
    text = (asset_path("kernels") / "cuda" / "gemm/fp32_fallback.cu").read_text()
    for packed in PACKED_TILES["full"]:
        tile = packed.fallback_tile
        assert (tile.m, tile.n, tile.warp_n) == (PACKED_ROWS, packed.n, packed.n // 2)
        mma = f"Fma<{tile.warp_m}, TILE_N / 2>, SHARED_BYTES"
        assert f"Tile<PACKED_ROWS, TILE_N, {tile.k}, {tile.slices}, {tile.stages}, {mma}> FmaTile;" in text


@given(lengths, st.sampled_from(TILES), st.booleans())
def test_the_launches_cover_operands_and_result(
    lengths: tuple[int, int, int, int], tile: PackedTile, transpose_a: bool
) -> None:
    batch, m, n, k = lengths
    product = PackedGemm(H200, lengths, tile, (transpose_a, True))
    kernel = product.kernel()
    rows = [0 if direct else length for length, direct in zip((m, n), product.direct, strict=True)]
    steps = 3 if tile.kind is MmaKind.FP16X2 else 1 if any(rows) else 0
    assert [launch.file for launch in kernel.launches].count("gemm/pack.cu") == steps
    assert product.row_blocks * 128 >= batch * (m + n)
    assert product.packed_row_blocks * 128 >= batch * sum(rows)
    assert product.tiles * tile.m * tile.n >= batch * m * n
    assert 1 <= product.chunks <= product.k_tiles
    if steps:
        assert kernel.launches[0].blocks == (2 * product.packed_row_blocks, product.chunks)
    assert kernel.scratch is not None
    assert kernel.scratch >= batch * sum(rows) * k * tile.terms * (4 if tile.kind is MmaKind.TF32 else 2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_gpus_have_other_kernels_for_large_products(precision: str) -> None:
    matrix = ArrayType((4096, 4096), np.dtype("float32"))
    assert isinstance(gemms(H200, matrix, matrix, False, False, precision)[0], PackedGemm)
    found = gemms(A100, matrix, matrix, False, False, precision)
    assert found
    assert not any(isinstance(product, PackedGemm) for product in found)


def sources() -> list[Source]:
    """Each tile has one of the alignments of rows that it suits."""
    found: dict[Source, None] = {}
    layouts = ((1024, (False, False)), (1023, (True, True)), (1022, (False, True)), (1024, (False, True)))
    for i, tile in enumerate(TILES):
        fitting = [(n, (a, b)) for n, (a, b) in layouts if tile.suits(n, n, n, (not a, b))]
        size, transposed = fitting[i % len(fitting)]
        for launch in PackedGemm(H200, (2, size, size, size), tile, transposed).kernel().launches:
            found[launch_source(launch)] = None
    return list(found)


@pytest.mark.exhaustive
@pytest.mark.needs_nvrtc
def test_the_kernels_compile_without_spills_or_serialized_wgmma(nvrtc_log: NvrtcLog) -> None:
    for source in sources():
        log = nvrtc_log(source, architecture(HOPPER)).splitlines()
        wrong = [line for line in log if "spill" in line and " 0 bytes spill stores" not in line]
        wrong += [line for line in log if "serializ" in line or "setmaxnreg" in line]
        assert wrong == [], source.name


@pytest.mark.needs_nvrtc
@pytest.mark.parametrize("name", STRUCT_BYTES)
def test_a_wrong_number_of_bytes_does_not_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRUCT_BYTES, name, STRUCT_BYTES[name] - 16)
    gemm = PackedGemm(H200, (1, 1024, 1024, 1024), TILES[0], (False, False)).kernel().launches[3]
    with pytest.raises(CudaCompilerError, match="static assertion"):
        compiler.compile_source(launch_source(gemm), architecture(HOPPER))
