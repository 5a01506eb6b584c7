"""Matrix products of packed operands, without a GPU: choice, launches, accuracy, and compilation."""

from __future__ import annotations

import re

import numpy as np
import packed_gemm_emulated
import pytest
from conftest import NvrtcLog
from hypothesis import given
from hypothesis import strategies as st
from packed_gemm_emulated import (
    LEVEL,
    LOW_ORDER_PAIRS,
    NOISE,
    OF_FP16X2,
    errors,
    hard,
    packed_gemm,
    row_stats,
    sequential_fma,
    uses_bf16x3,
    usual,
)
from test_gpu_products import adversarial

from adtrain.assets import asset_path
from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import CudaCompilerError, Source, architecture
from adtrain.backends.cuda.launch_plan import launch_source
from adtrain.backends.cuda.targets import H200
from adtrain.core.target import Target
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.cost_model import Gathers, ranked
from adtrain.lowering.cuda.gemm.matmul import gemms
from adtrain.lowering.cuda.gemm.packed import (
    CAPABILITY,
    PACKED_ROWS,
    PACKED_TILES,
    STRUCT_BYTES,
    PackedGemm,
    PackedTile,
)
from adtrain.lowering.cuda.gemm.tiles import MmaKind

A100 = Target((8, 0), 108, 163 << 10)
B200 = Target((10, 0), 148, 227 << 10)
PRECISIONS = tuple(PACKED_TILES)
TILES = tuple(tile for several in PACKED_TILES.values() for tile in several)
M, N, K = 128, 64, PACKED_TILES["full"][0].min_k

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
    assert not any(chosen(8192, 8192, K - 1))


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


@pytest.mark.parametrize("case", [*adversarial(M, N, K), *hard(M, N, K)])
def test_packed_products_with_their_fallback_are_as_exact_as_sequential_fma(case: str) -> None:
    a, b = (x.astype(np.float32) for x in {**adversarial(M, N, K), **hard(M, N, K)}[case])
    plain, (packed, fallback) = sequential_fma(a, b), packed_gemm(a, b)
    taken, expected = errors(np.where(fallback, plain, packed), a, b), errors(plain, a, b)
    assert taken[0] <= max(NOISE * expected[0], OF_FP16X2)
    assert taken[1] <= NOISE * expected[1]


@pytest.mark.parametrize("case", ["one of 50 of both", "one of 100 not zero", "thirty decades"])
def test_products_of_sparse_rows_are_computed_in_bf16x3(case: str) -> None:
    a, b = (x.astype(np.float32) for x in {**adversarial(M, N, K), **hard(M, N, K)}[case])
    assert uses_bf16x3(row_stats(a), row_stats(b.T))
    assert packed_gemm(a, b)[1].mean() < 0.05


@pytest.mark.parametrize("case", usual(M, N, K))
def test_typical_products_need_almost_no_fallback(case: str) -> None:
    a, b = (x.astype(np.float32) for x in usual(M, N, K)[case])
    assert not uses_bf16x3(row_stats(a), row_stats(b.T))
    assert packed_gemm(a, b)[1].mean() < 5e-4


def test_the_emulation_has_the_constants_of_the_kernels() -> None:
    names = ("gemm/pack.cu", "gemm/packed.cuh", "gemm/packed_gemm.cu", "sm90/bf16x3.cuh")
    text = "".join((asset_path("kernels") / "cuda" / name).read_text() for name in names)
    of_packed = ("PACKED_ROWS", "PACKED_K", "FALLBACK_CAPACITY", "FEW_TILES", "VOTES_SHARE", "CHECKED_TILES")
    of_pack = ("STATISTICS_TILES", "MIN_PRODUCTS", "SPARSE", "MIN_ROUNDINGS", "SINGLE_ELEMENTS", "SKIP_RATIO")
    for name in (*of_packed, *of_pack):
        value = getattr(packed_gemm_emulated, name)
        assert re.search(rf"constexpr int[^;]*\b{name} = [^;]*\b{value}\b[^;]*;", text), name
    assert f"level = {LEVEL}f * (float)mean" in text
    assert f"pairs[] = {LOW_ORDER_PAIRS};".replace("(", "{").replace(")", "}") in text


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
    """The first tile has all alignments of rows, each other tile one that it suits."""
    found: dict[Source, None] = {}
    layouts = ((1024, (False, False)), (1023, (True, True)), (1022, (False, True)), (1024, (False, True)))
    for i, tile in enumerate(TILES):
        fitting = [(n, (a, b)) for n, (a, b) in layouts if tile.suits(n, n, n, (not a, b))]
        for size, transposed in fitting if i == 0 else [fitting[i % len(fitting)]]:
            for launch in PackedGemm(H200, (2, size, size, size), tile, transposed).kernel().launches:
                found[launch_source(launch)] = None
    return list(found)


@pytest.mark.exhaustive
@pytest.mark.needs_nvrtc
def test_the_kernels_compile_without_spills_or_serialized_wgmma(nvrtc_log: NvrtcLog) -> None:
    for source in sources():
        log = nvrtc_log(source, architecture(CAPABILITY)).splitlines()
        wrong = [line for line in log if "spill" in line and " 0 bytes spill stores" not in line]
        wrong += [line for line in log if "serializ" in line or "setmaxnreg" in line]
        assert wrong == [], source.name


@pytest.mark.needs_nvrtc
@pytest.mark.parametrize("name", STRUCT_BYTES)
def test_a_wrong_number_of_bytes_does_not_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRUCT_BYTES, name, STRUCT_BYTES[name] - 16)
    gemm = PackedGemm(H200, (1, 1024, 1024, 1024), TILES[0], (False, False)).kernel().launches[3]
    with pytest.raises(CudaCompilerError, match="static assertion"):
        compiler.compile_source(launch_source(gemm), architecture(CAPABILITY))
