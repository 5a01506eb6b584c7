"""The GPU: shifted implicit GEMM convolutions are right for all shapes, and as exact as float32 sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conv_samples import DECADES, cases, stride_one
from gpu_kernels import run_twice
from gpu_parity import gpu, hopper, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from product_samples import NOISE, ROUNDINGS, errors, sequential_fma
from test_cuda_shifted_conv import WIDTHS, convolutions
from test_gpu_products import distance, rounded

from adtrain import ops
from adtrain.core.array import array
from adtrain.core.precision import PRECISIONS
from adtrain.core.primitive import Primitive
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.lowering.cuda.conv.problem import Algorithm, ConvProblem, PaddedIndex
from adtrain.lowering.cuda.conv.shifted import ShiftedConv
from adtrain.lowering.cuda.conv.shifted_fp16x2 import Fp16x2Conv, Fp16x2WeightGrad
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p
from adtrain.passes import ALL

__all__ = ["gpu", "hopper", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = 3e-7
"""Of the norm of the difference over the norm."""
ROUNDED = 1e-5
"""The same where operands are rounded, and their products summed up by the matrix units."""
M, N, K = 48, 80, 288


def window(problem: ConvProblem) -> Window:
    return Window((1, 1), problem.padding, problem.dilation, 1)


def algorithms(gpu: Any, problem: ConvProblem, flipped: bool) -> list[Algorithm]:
    """In bf16x3, with the tiles of the rule, and in fp16x2, where supported."""
    index, target = PaddedIndex(problem), gpu.lowering.target
    bf16x3, fp16x2 = ShiftedConv(index, target, flipped).best(), Fp16x2Conv(index, target, flipped)
    return [*([bf16x3] if bf16x3 else []), *([fp16x2] if fp16x2.supported() else [])]


def forward(gpu: Any, problem: ConvProblem, algorithm: Algorithm, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return run_twice(gpu, conv2d_p, algorithm.kernels()[0], [x, w], window=window(problem))[0]


def input_grad(gpu: Any, problem: ConvProblem, algorithm: Algorithm, g: np.ndarray, w: np.ndarray) -> np.ndarray:
    params: dict[str, Any] = {"window": window(problem), "size": problem.images[2:]}
    return run_twice(gpu, input_grad_p, algorithm.kernels()[0], [g, w], **params)[0]


def weight_grad(gpu: Any, problem: ConvProblem, algorithm: Algorithm, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    params: dict[str, Any] = {"window": window(problem), "size": problem.kernel}
    return run_twice(gpu, weight_grad_p, algorithm.kernels()[0], [x, g], **params)[0]


def drawn(problem: ConvProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, weights, and gradients of the outputs."""
    rng = np.random.default_rng(0)
    weights = (problem.outputs[1], problem.images[1], *problem.kernel)
    x, w, g = (rng.standard_normal(shape, np.float32) for shape in (problem.images, weights, problem.outputs))
    x.flat[:3], g.flat[:2] = 1e-9, -3e-10  # small beside the others of their images
    return x, w, g


def same(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    """Whether what is not finite is where it is expected, and all else right."""
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    return distance(found[held], expected[held]) < tolerance


def by_numpy(primitive: Primitive, *arrays: np.ndarray, **params: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray(primitive.reference(*arrays, **params))


def by_other_kernels(primitive: Primitive, *arrays: np.ndarray, **params: Any) -> np.ndarray:
    """For float64 there are none of the kernels under test."""
    found: np.ndarray = bind(primitive, *(array(v, device="gpu") for v in arrays), **params).numpy()
    return found


def check(
    gpu: Any,
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    g: np.ndarray,
    exact: Callable[..., np.ndarray] = by_numpy,
) -> None:
    """All gradients and results, against those of float64 numbers by ``exact``."""
    wide = [rounded(v, problem.precision).astype(float) for v in (x, w, g)]
    tolerance = TOLERANCE if problem.precision == "full" else ROUNDED
    params: dict[str, Any] = {"window": window(problem), "precision": "full"}
    y = exact(conv2d_p, *wide[:2], **params)
    dx = exact(input_grad_p, wide[2], wide[1], size=problem.images[2:], **params)
    dw = exact(weight_grad_p, wide[0], wide[2], size=problem.kernel, **params)
    for algorithm in algorithms(gpu, problem, False):
        assert same(forward(gpu, problem, algorithm, x, w), y, tolerance)
    for algorithm in algorithms(gpu, problem.transposed(), True):
        assert same(input_grad(gpu, problem, algorithm, g, w), dx, tolerance)
    index, target = PaddedIndex(problem), gpu.lowering.target
    grads: list[ShiftedWeightGrad | Fp16x2WeightGrad] = [*ShiftedWeightGrad(index, target).choices()]
    for grad in (*grads, Fp16x2WeightGrad(index, target)):
        if grad.supported():
            assert same(weight_grad(gpu, problem, grad, x, g), dw, tolerance)


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(convolutions(), st.integers(1, 80), st.integers(1, 140), st.sampled_from(PRECISIONS))
def test_convolutions_of_all_shapes_are_right(
    gpu: Any, small: ConvProblem, channels: int, filters: int, precision: str
) -> None:
    (count, _, *size), (_, _, *out) = small.images, small.outputs
    shapes = (count, channels, *size), (count, filters, *out)
    problem = stride_one(*shapes, small.kernel, small.padding, small.dilation, precision)
    check(gpu, problem, *drawn(problem))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("image", "filters", "padding"),
    [((140, 32, 26, 26), 64, 0), ((9, 70, 31, 45), 33, 1), ((2, 16, 5, 190), 130, 1), ((300, 64, 7, 7), 20, 2)],
)
def test_large_convolutions_are_right(
    gpu: Any, image: tuple[int, ...], filters: int, padding: int, precision: str
) -> None:
    size = [n + 2 * padding - 2 for n in image[2:]]
    problem = stride_one(image, (image[0], filters, *size), (3, 3), (padding, padding), (1, 1), precision)
    check(gpu, problem, *drawn(problem), by_other_kernels)


@pytest.mark.parametrize("filters", [40, 20])
def test_tiles_of_all_widths_give_the_same(gpu: Any, filters: int) -> None:
    """With separate and with stacked parts of the filters."""
    problem = stride_one((30, 24, 19, 21), (30, filters, 19, 21), (3, 3), (1, 1))
    x, w, _ = drawn(problem)
    choices = ShiftedConv(PaddedIndex(problem), gpu.lowering.target, False).choices()
    found = [forward(gpu, problem, tiles, x, w) for tiles in choices if tiles.columns in WIDTHS]
    assert len({y.tobytes() for y in found}) == 1
    expected = conv2d_p.reference(x.astype(float), w.astype(float), window(problem), "full")
    assert distance(found[0], expected) < TOLERANCE


def test_infinity_and_nan_propagate_as_in_float32_sums(gpu: Any) -> None:
    problem = stride_one((3, 40, 12, 13), (3, 70, 12, 13), (3, 3), (1, 1))
    x, w, g = drawn(problem)
    x[0, 1, 2, 3], x[1, 2, 0, 0], x[2, 39, 11, 12] = np.inf, np.nan, -np.inf
    g[1, 3, 4, 5], g[2, 69, 0, 12] = np.inf, np.nan
    check(gpu, problem, x, w, g)


@pytest.mark.parametrize(("kind", "filters"), [(ShiftedConv, M), (ShiftedConv, M // 2), (Fp16x2Conv, M)])
def test_they_are_as_exact_as_sequential_fma_sums(gpu: Any, filters: int, kind: type[ShiftedConv | Fp16x2Conv]) -> None:
    """With separate and with stacked parts of the filters."""
    problem = stride_one((1, K, 1, N), (1, filters, 1, N), (1, 1), (0, 0))
    algorithm = kind(PaddedIndex(problem), gpu.lowering.target, False)
    for case, (a, b) in cases(filters, N, K).items():
        found = forward(gpu, problem, algorithm, b.reshape(1, K, 1, N), a.reshape(filters, K, 1, 1))
        taken, expected = errors(found.reshape(filters, N), a, b), errors(sequential_fma(a, b), a, b)
        assert taken[0] <= max(NOISE * expected[0], ROUNDINGS), case
        assert taken[1] <= max((DECADES if "decades" in case else NOISE) * expected[1], ROUNDINGS), case


def test_the_same_bytes_each_time(gpu: Any) -> None:
    """Of images some of which fall back from fp16x2 to bf16x3."""
    problem = stride_one((60, 40, 27, 26), (60, 70, 27, 26), (3, 3), (1, 1))
    x, w, _ = drawn(problem)
    x[::3, ::2] *= np.float32(1e-20)
    algorithm = Fp16x2Conv(PaddedIndex(problem), gpu.lowering.target, False)
    first = forward(gpu, problem, algorithm, x, w)
    assert all(np.array_equal(forward(gpu, problem, algorithm, x, w), first) for _ in range(5))


def test_epilogue_is_applied_once_to_each_element(gpu: Any) -> None:
    """In one launch with it: bias and activation, and the mask on the gradient by the images."""
    problem = stride_one((40, 32, 26, 26), (40, 64, 24, 24), (3, 3), (0, 0))
    x, w, _ = drawn(problem)
    bias = np.linspace(-1, 1, 64, dtype=np.float32)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        y = ops.relu(ops.conv2d(x, w, bias))
        return y, ops.where(ops.less(0, x), ops.conv_transpose2d(y, w), 0)

    found = [v.numpy() for v in stage(layer, ALL)(*(array(v, device="gpu") for v in (x, w, bias)))]
    expected = [v.numpy() for v in layer(*(array(v.astype(float)) for v in (x, w, bias)))]
    assert all(distance(*both) < TOLERANCE for both in zip(found, expected, strict=True))
