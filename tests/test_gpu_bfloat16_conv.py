"""The GPU: convolutions of bfloat16 images, and their gradients, are right for all windows and channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv_samples import DECADES, cases
from gpu_kernels import run_twice
from gpu_parity import gpu, hopper, poisoned
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from product_samples import NOISE, ROUNDINGS, errors, sequential_fma
from test_cuda_bfloat16_conv_on_host import KINDS, TOLERANCES, primitive_of, problem, product_of_pixels, tiles

from adtrain.core.precision import TERMS, TF32
from adtrain.lowering.cuda.conv.bfloat16 import Loader
from adtrain.lowering.cuda.conv.problem import Direction
from adtrain.lowering.cuda.gemm.bfloat16 import GATHER_TILES, GATHER_TILES_OF_TERMS, TILE_K, TILES
from adtrain.ops.conv import Window

__all__ = ["gpu", "hopper", "poisoned"]

pytestmark = pytest.mark.gpu


def pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


INSTRUCTION_K = {"bfloat16": 16, "tf32": 8}
"""Products that a tensor core adds to a sum at once. The truncation of each sum is 2^-24 of it on average."""

eights = st.integers(1, 40).map(lambda n: 8 * n)


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "operand_format"), KINDS)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    count=st.integers(1, 40),
    size=pairs(1, 20),
    channels=st.tuples(eights, eights),
    kernel=pairs(1, 5),
    window=st.tuples(pairs(1, 3), pairs(0, 3), pairs(1, 3)),
    index=st.integers(0, len(TILES) + len(GATHER_TILES) - 1),
    splits=st.sampled_from([1, 1, 2, 5]),
)
def test_convolutions_and_gradients_are_right(
    gpu: Any,
    direction: Direction,
    operand_format: str,
    count: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    index: int,
    splits: int,
) -> None:
    moves = Window(*window, 1)
    assume(min(moves.output_length(i, size[i], kernel[i]) for i in (0, 1)) > 0)
    conv, arrays, params = problem(direction, (count, *size, channels[0]), channels[1], kernel, moves, operand_format)
    terms = TERMS[operand_format]
    gathers = operand_format == "bfloat16" or (direction, terms) == (Direction.WEIGHT_GRAD, 2)
    gathering = GATHER_TILES_OF_TERMS[terms] if gathers else ()
    choices = [*((x, Loader.TMA) for x in tiles(operand_format)), *((x, Loader.GATHER) for x in gathering)]
    tile, loader = choices[index % len(choices)]
    conv = conv._replace(loader=loader)
    assume(conv.fits() and conv.product(gpu.lowering.target, tile).has_whole_boxes())
    splits = min(splits, -(-conv.lengths[3] // TILE_K))
    work = conv.product(gpu.lowering.target, tile, splits)
    primitive = primitive_of(conv, params)
    found = run_twice(gpu, primitive, conv.cuda_kernel(work), arrays, **params)[0]
    expected = primitive.reference(*arrays, **params)
    truncations = 0.0 if conv.terms > 1 else conv.lengths[3] / splits / INSTRUCTION_K[operand_format]
    tolerance = 2 * TOLERANCES[conv.terms] + truncations * 2.0**-24
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("operand_format", ["bfloat16", TF32])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.INPUT_GRAD])
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    count=st.integers(1, 40),
    size=pairs(1, 20),
    channels=st.tuples(*[st.integers(1, 13).map(lambda n: 8 * n)] * 2),
    kernel=pairs(1, 4),
    padding=pairs(0, 3),
    dilation=pairs(1, 3),
    index=st.integers(0, 5),
)
def test_images_that_are_copied_once_for_all_taps_are_right(
    gpu: Any,
    direction: Direction,
    operand_format: str,
    count: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    index: int,
) -> None:
    window = Window((1, 1), padding, dilation, 1)
    assume(min(window.output_length(i, size[i], kernel[i]) for i in (0, 1)) > 0)
    conv, arrays, params = problem(direction, (count, *size, channels[0]), channels[1], kernel, window, operand_format)
    conv = conv._replace(loader=Loader.SHIFT)
    works = conv.products(gpu.lowering.target) if conv.fits() else []
    assume(works)
    primitive = primitive_of(conv, params)
    candidate = conv.cuda_kernel(works[index % len(works)])
    found = run_twice(gpu, primitive, candidate, arrays, **params)[0]
    expected = primitive.reference(*arrays, **params)
    tolerance = 2 * TOLERANCES[1] + conv.lengths[3] / INSTRUCTION_K[operand_format] * 2.0**-24
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def test_three_terms_are_as_exact_as_sequential_fma_sums(gpu: Any) -> None:
    for case, (a, b) in cases(48, 80, 288).items():
        conv, arrays, params = product_of_pixels(a, b)
        kernel = conv.cuda_kernel(conv.product(gpu.lowering.target))
        found = run_twice(gpu, primitive_of(conv, params), kernel, arrays, **params)[0].T
        taken, expected = errors(found, a, b), errors(sequential_fma(a, b), a, b)
        assert taken[0] <= max(NOISE * expected[0], ROUNDINGS), case
        assert taken[1] <= max((DECADES if "decades" in case else NOISE) * expected[1], ROUNDINGS), case
