"""Products that cut operands in pieces on the way, as far as they need no GPU: the rule, how exact they are, that they
compile."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planes_emulated import cases, in_pieces
from packed_gemm_emulated import NOISE, OF_UNITS, TWO_ROUNDINGS, chain, errors

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import CudaCompilerError, architecture, file_source
from adtrain.core.chip import CHIP, Chip
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm.bf16x3 import DEPTH, ROWS, WIDTHS, Cut, PieceProduct, cuts
from adtrain.lowering.cuda.gemm.cost_model import Gathers, ranked
from adtrain.lowering.cuda.gemm.matmul import engines
from adtrain.lowering.cuda.gemm.packed import CAPABILITY

H200 = Chip(132, CAPABILITY)
M, N = 48, 40
FLAGS = ((False, False), (False, True), (True, False), (True, True))

lengths = st.tuples(st.integers(1, 4), *[st.integers(1, 20000)] * 3)


def test_products_of_few_tiles_cut_their_sums_in_parts() -> None:
    """The linear layers of cnn.yaml, at batch 1024: forward, and its gradients."""
    cut, parts = ranked(4, 1, 1024, 128, 9216, H200)[0]
    assert isinstance(cut, Cut)
    assert parts > 1
    assert isinstance(ranked(4, 1, 1024, 9216, 128, H200)[0][0], Cut)
    assert isinstance(ranked(4, 1, 128, 9216, 1024, H200)[0][0], Cut)
    assert not isinstance(ranked(4, 1, 4096, 4096, 4096, H200)[0][0], Cut)


@given(lengths)
def test_each_part_has_stages_and_shared_memory_holds_them(lengths: tuple[int, int, int, int]) -> None:
    for cut, parts in cuts(*lengths):
        assert 1 <= parts <= -(-lengths[-1] // DEPTH)
        for transposed in FLAGS:
            found = PieceProduct(lengths, cut, parts, transposed)
            assert found.shared <= (227 << 10) - 1024
            assert found.tiles * ROWS * cut.n >= lengths[0] * lengths[1] * lengths[2]


def test_only_hopper_has_them_only_of_plain_float32_and_not_of_images() -> None:
    assert not any(isinstance(tile, Cut) for tile, _ in ranked(4, 1, 1024, 128, 9216, Chip(132, (10, 0))))
    assert not any(isinstance(tile, Cut) for tile, _ in ranked(4, 1, 1024, 128, 9216, H200, "tf32"))
    assert not any(isinstance(tile, Cut) for tile, _ in ranked(8, 1, 1024, 128, 9216, H200))
    assert not any(isinstance(tile, Cut) for tile, _ in ranked(4, 1, 1024, 128, 9216, H200, gathers=Gathers.PIXELS))


def test_matrices_whose_elements_32_bits_do_not_count_are_computed_otherwise() -> None:
    assert cuts(1, 1 << 20, 128, 1 << 10) == cuts(1, 128, 1 << 20, 1 << 11) == []
    assert cuts(1, 1 << 19, 128, 1 << 10)


@pytest.mark.parametrize(("k", "parts"), [(128, 1), (256, 2), (1024, 4)])
@pytest.mark.parametrize("case", cases(M, N, 128))
def test_products_are_as_exact_as_one_chain_of_multiply_adds(case: str, k: int, parts: int) -> None:
    a, b = cases(M, N, k)[case]
    each = k // parts
    found = sum(in_pieces(a[:, i : i + each], b[i : i + each]) for i in range(0, k, each))
    assert isinstance(found, np.ndarray)
    (largest, norm), plain = errors(found, a, b), errors(chain(a, b), a, b)
    assert largest <= max(NOISE * plain[0], OF_UNITS)
    assert norm <= max(NOISE * plain[1], TWO_ROUNDINGS)


def test_gpus_without_the_kernel_compute_such_products_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (ArrayType(shape, np.dtype("float32")) for shape in ((1024, 9216), (128, 9216)))
    assert isinstance(engines(a, b, False, True)[0], PieceProduct)
    monkeypatch.setattr(CHIP, "capability", (8, 0))
    assert not any(isinstance(found, PieceProduct) for found in engines(a, b, False, True))


def test_the_kernel_compiles_and_neither_spills_registers_nor_waits_for_each_product() -> None:
    try:
        compiler.version()
    except CudaCompilerError as error:
        pytest.skip(str(error))
    ways = [(size, width, FLAGS[i % 4]) for i, (size, width) in enumerate(product((1021, 1022, 1024), WIDTHS))]
    for size, width, transposed in [*ways, *((1024, 128, each) for each in FLAGS)]:
        kernel = PieceProduct((2, size, size, size), Cut(width), 1 + size % 2, transposed).kernel()
        source = file_source(kernel.file, (np.dtype("float32"),), tuple(sorted(kernel.definitions().items())))
        log = compiler.compile_source(source, architecture(CAPABILITY)).log.splitlines()
        wrong = [line for line in log if "spill" in line and " 0 bytes spill stores" not in line]
        wrong += [line for line in log if "serializ" in line or "setmaxnreg" in line]
        assert wrong == [], (size, width, transposed)
