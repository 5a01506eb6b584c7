"""`gemm/small_gemm.cu` and its epilogues, emulated on the CPU, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import ON_GPU
from sweeps import spread

from adtrain import ops
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.core.program import PRODUCT, Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm import MEMBER_TILES, BlockGemm
from adtrain.lowering.cuda.gemm.tiles import SMALL_TILES, SmallTile
from adtrain.ops.matmul import matmul_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TOLERANCE = 3e-7
"""Of the norm of the difference over the norm."""
TILES = tuple(SmallTile(*arguments) for arguments in dict.fromkeys((*SMALL_TILES, *MEMBER_TILES.values())))
FLOAT32 = np.dtype("float32")
TRANSPOSED = tuple(product((False, True), repeat=2))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def operands(batch: int, m: int, n: int, k: int, ta: bool, tb: bool) -> list[np.ndarray]:
    return [drawn(batch, *((k, m) if ta else (m, k))), drawn(batch, *((n, k) if tb else (k, n)))]


def matmul(arrays: Sequence[np.ndarray], ta: bool, tb: bool) -> Equation:
    a, b = (Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "full"}
    out = matmul_p.shape(a.type, b.type, **params)
    assert isinstance(out, ArrayType)
    return Equation(matmul_p, (a, b), params, (Variable(out, "gpu"),))


def reference(arrays: Sequence[np.ndarray], ta: bool, tb: bool) -> np.ndarray:
    a, b = (x.astype(np.float64) for x in arrays)
    return np.asarray((a.swapaxes(-1, -2) if ta else a) @ (b.swapaxes(-1, -2) if tb else b))


def alternating(shapes: Sequence[Any], tile: SmallTile) -> Any:
    """One of two shapes. Each transposition gets both of them."""
    return shapes[TILES.index(tile) // len(TRANSPOSED) % 2]


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected))


@pytest.mark.parametrize(("tile", "transposed"), spread(TILES, TRANSPOSED))
def test_every_tile_multiplies_matrices_of_any_lengths(
    host: Host, tile: SmallTile, transposed: tuple[bool, bool]
) -> None:
    shape: tuple[int, int, int, int] = alternating([(2, 36, 44, 148), (1, 33, 19, 37)], tile)
    arrays = operands(*shape, *transposed)
    gemm = BlockGemm(shape, FLOAT32, tile.for_k(shape[3]), 1, transposed)
    (found,) = host.computed(matmul(arrays, *transposed), gemm.kernel(), arrays)
    assert close(found, reference(arrays, *transposed))


def test_empty_sums_are_zero(host: Host) -> None:
    arrays = operands(1, 16, 16, 0, True, False)
    gemm = BlockGemm((1, 16, 16, 0), FLOAT32, TILES[0].for_k(0), 1, (True, False))
    assert not host.computed(matmul(arrays, True, False), gemm.kernel(), arrays)[0].any()


def test_infinity_and_nan_propagate_as_in_float32(host: Host) -> None:
    arrays = operands(1, 32, 32, 64, True, False)
    arrays[0][0, 3, 5], arrays[1][0, 60, 7] = np.inf, np.nan
    expected = reference(arrays, True, False)
    (found,) = host.computed(
        matmul(arrays, True, False), BlockGemm((1, 32, 32, 64), FLOAT32, TILES[-1], 1, (True, False)).kernel(), arrays
    )
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    assert close(found[held], expected[held])


def update(shape: tuple[int, int, int], ta: bool, tb: bool) -> tuple[Equation, list[np.ndarray], list[np.ndarray]]:
    """A `product` equation with matrices and a row beside the product, its arguments, and its results."""
    m, n, k = shape
    a, b = (x[0] for x in operands(1, m, n, k, ta, tb))
    momentum, bias = drawn(m, n), drawn(n)

    def step(a: Any, b: Any, momentum: Any, bias: Any) -> Any:
        moved = momentum * 0.5 + ops.matmul(a, b, transpose_a=ta, transpose_b=tb)
        return moved, ops.relu(moved + bias)

    given = (a, b, momentum, bias)
    program = stage(step, ON_GPU).program(*given)
    (equation,) = [e for e in program.equations if e.form == PRODUCT]
    known = dict(zip(program.inputs, given, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    moved = momentum * 0.5 + reference((a, b), ta, tb)
    results = dict(zip(program.outputs, (moved, np.maximum(moved + bias, 0)), strict=True))
    return equation, [known[v] for v in equation.inputs], [results[v] for v in equation.outputs]


@pytest.mark.parametrize(("tile", "transposed"), spread(TILES[::4], TRANSPOSED))
def test_products_with_an_epilogue_and_lengths_known_when_compiled_are_right(
    host: Host, tile: SmallTile, transposed: tuple[bool, bool]
) -> None:
    shape: tuple[int, int, int] = alternating([(32, 64, 128), (36, 44, 52)], tile)
    equation, arrays, expected = update(shape, *transposed)
    kernel = BlockGemm((1, *shape), FLOAT32, tile.for_k(shape[2]), 1, transposed).kernel()
    (launch,) = host.lowering.launches(equation, kernel)
    assert isinstance(launch, LaunchPlan)
    assert f"#define LENGTHS {', '.join(map(str, shape))}\n" in launch.source.text
    found = host.computed(equation, kernel, arrays)
    assert all(close(x, y) for x, y in zip(found, expected, strict=True))
