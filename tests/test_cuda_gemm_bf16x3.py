"""`gemm/gemm_bf16x3.cu` without a GPU: when it is chosen, and compilation. Its accuracy: test_cuda_shifted_conv.py."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import NvrtcLog
from hypothesis import given
from hypothesis import strategies as st

from adtrain.backends.cuda import H200
from adtrain.backends.cuda.compiler import architecture
from adtrain.backends.cuda.launch_plan import launch_source
from adtrain.core.kernel import HOPPER, Target
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm import gemms
from adtrain.lowering.cuda.gemm.bf16x3 import TILE_K, TILE_M, Bf16x3Gemm, Bf16x3Tile
from adtrain.lowering.cuda.gemm.cost_model import BF16X3_WIDTHS, Gathers, bf16x3_choices, ranked

A100 = Target((8, 0), 108, 163 << 10)
B200 = Target((10, 0), 148, 227 << 10)
FLAGS = ((False, False), (False, True), (True, False), (True, True))

lengths = st.tuples(st.integers(1, 4), *[st.integers(1, 20000)] * 3)


def test_products_with_few_tiles_split_k() -> None:
    """The linear layers of cnn.yaml at batch 1024, forward and gradients."""
    tile, splits = ranked(4, 1, 1024, 128, 9216, H200)[0]
    assert isinstance(tile, Bf16x3Tile)
    assert splits > 1
    assert isinstance(ranked(4, 1, 1024, 9216, 128, H200)[0][0], Bf16x3Tile)
    assert isinstance(ranked(4, 1, 128, 9216, 1024, H200)[0][0], Bf16x3Tile)
    assert not isinstance(ranked(4, 1, 4096, 4096, 4096, H200)[0][0], Bf16x3Tile)


@given(lengths)
def test_each_split_has_stages_that_fit_shared_memory(lengths: tuple[int, int, int, int]) -> None:
    for tile, splits in bf16x3_choices(*lengths, H200):
        assert 1 <= splits <= -(-lengths[-1] // TILE_K)
        for transposed in FLAGS:
            found = Bf16x3Gemm(H200, lengths, tile, splits, transposed)
            assert found.shared <= (227 << 10) - 1024
            assert found.tiles * TILE_M * tile.n >= lengths[0] * lengths[1] * lengths[2]


def test_bf16x3_wgmma_is_for_full_precision_float32_matrices_on_hopper() -> None:
    assert not any(isinstance(tile, Bf16x3Tile) for tile, _ in ranked(4, 1, 1024, 128, 9216, B200))
    assert not any(isinstance(tile, Bf16x3Tile) for tile, _ in ranked(4, 1, 1024, 128, 9216, H200, "tf32"))
    assert not any(isinstance(tile, Bf16x3Tile) for tile, _ in ranked(8, 1, 1024, 128, 9216, H200))
    assert not any(
        isinstance(tile, Bf16x3Tile) for tile, _ in ranked(4, 1, 1024, 128, 9216, H200, gathers=Gathers.PIXELS)
    )


def test_matrices_beyond_32_bit_offsets_have_other_kernels() -> None:
    assert bf16x3_choices(1, 1 << 20, 128, 1 << 10, H200) == []
    assert bf16x3_choices(1, 128, 1 << 20, 1 << 11, H200) == []
    assert bf16x3_choices(1, 1 << 19, 128, 1 << 10, H200)


def test_other_gpus_have_other_kernels() -> None:
    a, b = (ArrayType(shape, np.dtype("float32")) for shape in ((1024, 9216), (128, 9216)))
    assert isinstance(gemms(H200, a, b, False, True)[0], Bf16x3Gemm)
    assert not any(isinstance(found, Bf16x3Gemm) for found in gemms(A100, a, b, False, True))


@pytest.mark.exhaustive
@pytest.mark.needs_nvrtc
def test_the_kernel_compiles_without_spills_or_serialized_wgmma(nvrtc_log: NvrtcLog) -> None:
    sizes = (1021, 1022, 1024)
    ways = [(sizes[i % 3], width, FLAGS[i % 4]) for i, width in enumerate(BF16X3_WIDTHS)]
    for size, width, transposed in ways:
        gemm = Bf16x3Gemm(H200, (2, size, size, size), Bf16x3Tile(width), 1 + size % 2, transposed)
        launch = gemm.kernel().launches[0]
        log = nvrtc_log(launch_source(launch), architecture(HOPPER)).splitlines()
        wrong = [line for line in log if "spill" in line and " 0 bytes spill stores" not in line]
        wrong += [line for line in log if "serializ" in line or "setmaxnreg" in line]
        assert wrong == [], (size, width, transposed)
