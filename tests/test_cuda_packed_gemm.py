"""Products in slabs as far as they need no GPU: their launches, and that their kernels compile."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import packed_gemm_emulated
from hypothesis import given
from hypothesis import strategies as st
from packed_gemm_emulated import (
    BESIDE,
    LEVEL,
    NOISE,
    OF_HALVES,
    chain,
    errors,
    hard,
    in_slabs,
    known,
    many_left,
    usual,
)
from test_gpu_products import adversarial

from adtrain.assets import asset_path
from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import CudaCompilerError, Source, architecture, file_source
from adtrain.core.chip import CHIP, Chip
from adtrain.core.kernel import CudaKernel
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.cost_model import Gathers, ranked
from adtrain.lowering.cuda.gemm.matmul import engines
from adtrain.lowering.cuda.gemm.packed import CAPABILITY, LINES, SLABS, SlabProduct, Slabs
from adtrain.lowering.cuda.gemm.tiles import Unit

H200 = Chip(132, CAPABILITY)
PRECISIONS = tuple(SLABS)
EACH = tuple(slabs for several in SLABS.values() for slabs in several)
M, N, K = 128, 64, SLABS["full"][0].least

lengths = st.tuples(st.integers(1, 4), *[st.integers(1, 20000)] * 3)


def launches(product: SlabProduct) -> Iterator[CudaKernel]:
    kernel: CudaKernel | None = product.kernel()
    while kernel is not None:
        yield kernel
        kernel = kernel.then


def rule(m: int, n: int, k: int, precision: str = "full", chip: Chip = H200) -> list[bool]:
    """Which of the choices, the best first, are in slabs."""
    return [isinstance(tile, Slabs) for tile, _ in ranked(4, 1, m, n, k, chip, precision)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_large_products_are_computed_in_slabs_and_small_ones_are_not(precision: str) -> None:
    assert rule(4096, 4096, 4096, precision)[0]
    assert rule(4095, 4097, 4091, precision)[0]
    assert not rule(128, 512, 128, precision)[0]
    assert not rule(128, 128, 9216, precision)[0]


def test_only_hopper_has_them_only_of_float32_and_not_of_images() -> None:
    assert not any(rule(4096, 4096, 4096, chip=Chip(132, (10, 0))))
    assert not any(isinstance(tile, Slabs) for tile, _ in ranked(8, 1, 4096, 4096, 4096, H200))
    gathered = ranked(4, 1, 4096, 4096, 4096, H200, gathers=Gathers.PIXELS)
    assert not any(isinstance(tile, Slabs) for tile, _ in gathered)


def test_short_sums_are_left_to_what_is_as_exact() -> None:
    assert not any(rule(8192, 8192, K - 1))


@pytest.mark.parametrize("slabs", EACH)
def test_the_stages_fit_beside_what_a_block_has_of_its_own(slabs: Slabs) -> None:
    assert slabs.shared <= (227 << 10) - 1024


def test_what_is_left_is_computed_by_the_plain_tile_whose_threads_are_launched() -> None:
    text = (asset_path("kernels") / "cuda" / "gemm/fp32_fallback.cu").read_text()
    for slabs in SLABS["full"]:
        plain = slabs.rest
        assert (plain.m, plain.n, plain.warp_n) == (LINES, slabs.n, slabs.n // 2)
        unit = f"Fma<{plain.warp_m}, TILE_N / 2>"
        assert f"Tile<LINES, TILE_N, {plain.k}, {plain.slices}, {plain.stages}, {unit}> Plain;" in text


@pytest.mark.parametrize("case", [*adversarial(M, N, K), *hard(M, N, K)])
def test_products_in_slabs_with_what_they_leave_are_as_exact_as_one_chain(case: str) -> None:
    a, b = (x.astype(np.float32) for x in {**adversarial(M, N, K), **hard(M, N, K)}[case])
    plain, (halves, left) = chain(a, b), in_slabs(a, b)
    taken, expected = errors(np.where(left, plain, halves), a, b), errors(plain, a, b)
    assert taken[0] <= max(NOISE * expected[0], OF_HALVES)
    assert taken[1] <= NOISE * expected[1]


@pytest.mark.parametrize("case", ["one of 50 of both", "one of 100 not zero", "thirty decades"])
def test_sparse_lines_are_cut_in_pieces(case: str) -> None:
    a, b = (x.astype(np.float32) for x in {**adversarial(M, N, K), **hard(M, N, K)}[case])
    assert many_left(known(a), known(b.T))
    assert in_slabs(a, b)[1].mean() < 0.05


@pytest.mark.parametrize("case", usual(M, N, K))
def test_of_usual_products_next_to_nothing_is_left_to_multiply_adds(case: str) -> None:
    a, b = (x.astype(np.float32) for x in usual(M, N, K)[case])
    assert not many_left(known(a), known(b.T))
    assert in_slabs(a, b)[1].mean() < 5e-4


def test_the_limits_are_those_of_the_kernels() -> None:
    names = ("gemm/pack.cu", "gemm/packed.cuh", "gemm/packed_accumulate.cuh", "sm90/bf16x3.cuh")
    text = "".join((asset_path("kernels") / "cuda" / name).read_text() for name in names)
    limits = ("LISTED", "FEW_TILES", "MANY_VOTES", "WATCHED", "TELLING", "FEW", "THIN", "ROUNDED", "SINGLE", "SELDOM")
    for name in ("DEPTH", *limits):
        assert re.search(rf"constexpr int[^;]*\b{name} = [^;]*\b{getattr(packed_gemm_emulated, name)}\b[^;]*;", text), name
    assert f"level = {LEVEL}f * (float)mean" in text
    assert f"pairs[] = {BESIDE};".replace("(", "{").replace(")", "}") in text


@given(lengths, st.sampled_from(EACH), st.booleans())
def test_the_launches_cover_operands_and_result(lengths: tuple[int, int, int, int], slabs: Slabs, turned: bool) -> None:
    batch, m, n, k = lengths
    product = SlabProduct(lengths, slabs, (turned, True))
    first, *others = launches(product)
    laid = [0 if direct else lines for lines, direct in zip((m, n), product.direct, strict=True)]
    steps = 3 if slabs.unit is Unit.HALVES else 1 if any(laid) else 0
    assert [kernel.file for kernel in (first, *others)].count("gemm/pack.cu") == steps
    assert product.blocks * 128 >= batch * (m + n)
    assert product.laid * 128 >= batch * sum(laid)
    assert product.tiles * product.slabs.m * product.slabs.n >= batch * m * n
    assert 1 <= product.chunks <= product.depth
    if steps:
        assert first.blocks is not None
        assert first.blocks() == (2 * product.laid, product.chunks)
    assert first.scratch() >= batch * sum(laid) * k * product.slabs.pieces * (4 if slabs.unit is Unit.TF32 else 2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gpus_without_the_kernels_compute_such_products_otherwise(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = ArrayType((4096, 4096), np.dtype("float32"))
    assert isinstance(engines(matrix, matrix, False, False, precision)[0], SlabProduct)
    monkeypatch.setattr(CHIP, "capability", (8, 0))
    found = engines(matrix, matrix, False, False, precision)
    assert found
    assert not any(isinstance(product, SlabProduct) for product in found)


def sources() -> list[Source]:
    found: dict[Source, None] = {}
    for slabs in EACH:
        for size, transposed in ((1024, (False, False)), (1023, (True, True)), (1022, (False, True))):
            for kernel in launches(SlabProduct((2, size, size, size), slabs, transposed)):
                macros = tuple(sorted(kernel.definitions().items()))
                found[file_source(kernel.file, (np.dtype("float32"),), macros)] = None
    return list(found)


def test_the_kernels_compile_and_neither_spill_registers_nor_wait_for_each_product() -> None:
    try:
        compiler.version()
    except CudaCompilerError as error:
        pytest.skip(str(error))
    for source in sources():
        log = compiler.compile_source(source, architecture(CAPABILITY)).log.splitlines()
        wrong = [line for line in log if "spill" in line and " 0 bytes spill stores" not in line]
        wrong += [line for line in log if "serializ" in line or "setmaxnreg" in line]
        assert wrong == [], source.name
