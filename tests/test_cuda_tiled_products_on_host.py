"""`gemm/tile_products.cuh`, emulated on the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import for_gpu, names
from test_cuda_back_to_back_on_host import FEW, assert_right, computed, drawn

from adtrain import ops
from adtrain.core.kernel import Target
from adtrain.core.staging import stage

__all__ = ["host"]

TILED = ["weight_tiles", "tiled_product"]


def of_lengths(rows: int, inputs: int, columns: int, transposed: bool) -> list[np.ndarray]:
    weights = (columns, inputs) if transposed else (inputs, columns)
    return drawn((rows, inputs), weights, (columns,), (rows, columns))


@pytest.mark.parametrize(
    ("lengths", "transposed"),
    [
        ((128, 128, 192), True),  # three blocks for 128 rows
        pytest.param((256, 64, 128), False, marks=pytest.mark.exhaustive),  # a block has two tiles of columns
        pytest.param((256, 320, 64), False, marks=pytest.mark.exhaustive),  # more tiles of K than stages
    ],
)
def test_a_product_with_an_epilogue_is_right(lengths: tuple[int, int, int], transposed: bool, host: Host) -> None:
    given = of_lengths(*lengths, transposed)

    def f(x: Any, w: Any, b: Any, residual: Any) -> Any:
        y = ops.matmul(x, w, transpose_b=transposed) + b
        return y, y > 0, residual + ops.relu(y)

    host.lowering.target = FEW
    program = for_gpu(stage(f, ()).program(*given), FEW)
    assert names(program) == TILED
    y, positive, result = computed(host, program, given)
    x, w, b, residual = (array.astype(float) for array in given)
    expected = x @ (w.T if transposed else w) + b
    assert_right(y, expected)
    np.testing.assert_array_equal(positive, y > 0)
    assert_right(result, residual + np.maximum(expected, 0))


@pytest.mark.exhaustive
def test_sums_that_are_not_finite_match_a_float32_product(host: Host) -> None:
    x, w, *_ = of_lengths(256, 64, 128, True)
    x[3, 5], x[70, 7], w[9, 7] = np.inf, 1e30, 1e38

    def f(x: Any, w: Any) -> Any:
        return ops.matmul(x, w, transpose_b=True)

    host.lowering.target = FEW
    program = for_gpu(stage(f, ()).program(x, w), FEW)
    assert names(program) == TILED
    (found,) = computed(host, program, [x, w])
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x @ w.T
    held = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), held)
    np.testing.assert_array_equal(found[~held], expected[~held])


def test_weights_may_also_be_the_rows_and_an_addend(host: Host) -> None:
    (x,) = drawn((128, 128))

    def f(x: Any) -> Any:
        return ops.matmul(x, x) + x

    host.lowering.target = FEW
    program = for_gpu(stage(f, ()).program(x), FEW)
    assert names(program) == TILED
    (found,) = computed(host, program, [x])
    assert_right(found, x.astype(float) @ x + x)


def test_products_with_the_same_weights_share_their_tiles() -> None:
    x, w, _, y = of_lengths(256, 128, 128, True)

    def f(x: Any, w: Any, y: Any) -> Any:
        return ops.matmul(x, w, transpose_b=True), ops.matmul(y, w, transpose_b=True), ops.matmul(y, w)

    program = for_gpu(stage(f, ()).program(x, w, y), FEW)
    assert sorted(names(program)) == sorted([*TILED, *TILED[1:] * 2])
    (tiles,) = (e for e in program.equations if e.name == "weight_tiles")
    assert sorted(tiles.params["permuted"]) == [0, 1]


@pytest.mark.parametrize(
    ("lengths", "target"),
    [
        ((192, 64, 128), FEW),
        ((256, 96, 128), FEW),
        ((256, 64, 96), FEW),
        ((256, 576, 64), FEW),
        ((256, 64, 128), FEW._replace(multiprocessors=7)),
        ((256, 64, 128), FEW._replace(capability=(8, 0))),
    ],
)
def test_other_products_get_no_tiles(lengths: tuple[int, int, int], target: Target) -> None:
    x, w, *_ = of_lengths(*lengths, True)
    program = for_gpu(stage(lambda x, w: ops.matmul(x, w, transpose_b=True), ()).program(x, w), target)
    assert names(program) == ["matmul"]


def test_weights_that_the_program_computes_get_no_tiles() -> None:
    x, w, *_ = of_lengths(256, 64, 128, True)
    program = for_gpu(stage(lambda x, w: ops.matmul(x, w * 2, transpose_b=True), ()).program(x, w), FEW)
    assert "tiled_product" not in names(program)
