"""`gemm/back_to_back.cuh` and the tiles of weights, emulated on the CPU, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from cuda_samples import feed_forward
from program_samples import for_gpu, names

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.tiled_product import BACK_TO_BACK, weight_tiles_p
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

FEW = H200._replace(multiprocessors=2)
"""A target that few rows fill."""
TOLERANCE = 3e-7
"""The largest norm of the difference from float64, divided by the norm of the result in float64."""


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def computed(host: Host, program: Program, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a Program, whose equations run one after another."""
    known = dict(zip(program.inputs, given, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    for e in program.equations:
        arrays = [known[v] for v in e.inputs]
        found = [e.primitive.reference(*arrays, **e.params)] if e.is_view else host.computed(e, None, arrays)
        known.update(zip(e.outputs, found, strict=True))
    return [known[v] for v in program.outputs]


def assert_right(found: np.ndarray, expected: np.ndarray) -> None:
    held = np.isfinite(expected)
    np.testing.assert_array_equal(found[~held], expected[~held].astype(np.float32))
    assert np.linalg.norm(found[held] - expected[held]) <= TOLERANCE * np.linalg.norm(expected[held])


def of_lengths(rows: int, inputs: int, hidden: int, outputs: int, transposed: tuple[bool, bool]) -> list[np.ndarray]:
    first = (hidden, inputs) if transposed[0] else (inputs, hidden)
    second = (outputs, hidden) if transposed[1] else (hidden, outputs)
    return drawn((rows, inputs), first, (hidden,), second, (outputs,), (rows, outputs))


@pytest.mark.parametrize(
    ("lengths", "transposed"),
    [
        ((128, 128, 256, 128), (True, True)),
        pytest.param((128, 128, 384, 64), (True, False), marks=pytest.mark.exhaustive),
        pytest.param((128, 64, 128, 64), (False, False), marks=pytest.mark.exhaustive),
    ],
)
def test_a_feed_forward_layer_is_right(
    lengths: tuple[int, int, int, int], transposed: tuple[bool, bool], host: Host
) -> None:
    given = of_lengths(*lengths, transposed)

    def f(x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> Any:
        hidden = ops.relu(ops.matmul(x, w, transpose_b=transposed[0]) + b)
        return hidden, residual + (ops.matmul(hidden, v, transpose_b=transposed[1]) + c)

    host.lowering.target = FEW
    program = for_gpu(stage(f, ()).program(*given), FEW)
    assert names(program) == ["weight_tiles", "back_to_back"]
    hidden, result = computed(host, program, given)
    x, w, b, v, c, residual = (array.astype(float) for array in given)
    assert_right(hidden, np.maximum(x @ (w.T if transposed[0] else w) + b, 0))
    assert_right(result, residual + hidden.astype(float) @ (v.T if transposed[1] else v) + c)


def test_sums_that_are_not_finite_are_those_of_float32(host: Host) -> None:
    transposed = True, True
    given = of_lengths(128, 64, 128, 64, transposed)
    x, w, _, v, _, _ = given
    x[3, 5], w[9, 7], v[11, 13] = np.inf, 1e38, -np.inf
    x[70, 7] = 1e30

    def f(x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> Any:
        hidden = ops.matmul(x, w, transpose_b=True) + b
        return hidden, residual + (ops.matmul(hidden, v, transpose_b=True) + c)

    host.lowering.target = FEW
    program = for_gpu(stage(f, ()).program(*given), FEW)
    assert names(program) == ["weight_tiles", "back_to_back"]
    hidden, result = computed(host, program, given)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x @ w.T + given[2]
        np.testing.assert_array_equal(np.isfinite(hidden), np.isfinite(expected))
        np.testing.assert_array_equal(hidden[~np.isfinite(hidden)], expected[~np.isfinite(hidden)])
        expected = given[5] + (hidden @ v.T + given[4])
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))
    np.testing.assert_array_equal(result[~np.isfinite(result)], expected[~np.isfinite(result)])


def test_weights_may_also_be_the_rows_or_an_addend(host: Host) -> None:
    x, v = drawn((128, 64), (128, 64))

    def f(x: Any, v: Any) -> Any:
        hidden = ops.relu(ops.matmul(x, x, transpose_b=True))
        return hidden, ops.matmul(hidden, v) + v

    host.lowering.target = FEW
    program = for_gpu(stage(f, ()).program(x, v), FEW)
    assert names(program) == ["weight_tiles", "back_to_back"]
    hidden, result = computed(host, program, [x, v])
    assert_right(hidden, np.maximum(x.astype(float) @ x.T.astype(float), 0))
    assert_right(result, hidden.astype(float) @ v.astype(float) + v)


def feed_forward_gradients(*given: Any) -> Any:
    out, pullback = ad.vjp(feed_forward, *given)
    return out, pullback(out)


@pytest.mark.exhaustive
def test_a_layer_and_its_gradient_share_the_tiles(host: Host) -> None:
    *given, _ = of_lengths(256, 64, 128, 64, (True, True))
    target = FEW._replace(multiprocessors=4)
    program = for_gpu(stage(feed_forward_gradients, ()).program(*given), target)
    assert names(program).count("weight_tiles") == 1
    pairs = [e for e in program.equations if e.form == BACK_TO_BACK]
    tiles = [{v for v in e.inputs if v.type.dtype == np.uint16} for e in pairs]
    assert len(pairs) == 2
    assert tiles[0] == tiles[1]
    host.lowering.target = target
    out, gradients = feed_forward_gradients(*(ad.array(x.astype(float)) for x in given))
    for found, expected in zip(computed(host, program, given), (out, *gradients), strict=True):
        assert_right(found, expected.numpy())


@pytest.mark.parametrize(
    ("lengths", "target"),
    [
        ((128, 192, 128, 64), FEW),
        ((128, 64, 192, 64), FEW),
        ((192, 64, 128, 64), FEW),
        ((128, 64, 128, 64), FEW._replace(multiprocessors=4)),
        ((384, 64, 128, 64), FEW._replace(multiprocessors=5)),
        ((128, 64, 128, 64), FEW._replace(capability=(8, 0))),
        ((128, 128, 128, 64), FEW._replace(shared=160 << 10)),
    ],
)
def test_other_products_stay_apart(lengths: tuple[int, int, int, int], target: Target) -> None:
    given = of_lengths(*lengths, (True, True))

    def f(x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> Any:
        hidden = ops.relu(ops.matmul(x, w, transpose_b=True) + b)
        return hidden, residual + (ops.matmul(hidden, v, transpose_b=True) + c)

    assert "back_to_back" not in names(for_gpu(stage(f, ()).program(*given), target))


def test_products_whose_intermediate_is_not_needed_elsewhere_stay_apart() -> None:
    *given, _ = of_lengths(128, 64, 128, 64, (True, True))
    assert "back_to_back" not in names(for_gpu(stage(feed_forward, ()).program(*given), FEW))


def test_an_epilogue_that_reads_the_first_product_keeps_the_products_apart() -> None:
    given = of_lengths(256, 64, 128, 128, (True, True))

    def f(x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> Any:
        hidden = ops.relu(ops.matmul(x, w, transpose_b=True) + b)
        return hidden, hidden + (ops.matmul(hidden, v, transpose_b=True) + c)

    assert "back_to_back" not in names(for_gpu(stage(f, ()).program(*given), FEW))


@pytest.mark.parametrize("permuted", [0, 1])
def test_tiles_have_the_bits_of_the_reference(permuted: int, host: Host) -> None:
    (weights,) = drawn((128, 192))
    params = {"permuted": (permuted,)}
    types = [ArrayType(weights.shape, weights.dtype), *weight_tiles_p.output_types([weights], params)]
    matrix, tiles = (Variable(kind, "gpu") for kind in types)
    equation = Equation(weight_tiles_p, (matrix,), params, (tiles,))
    (found,) = host.computed(equation, None, [weights])
    np.testing.assert_array_equal(found, weight_tiles_p.reference(weights, **params))
