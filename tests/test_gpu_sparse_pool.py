"""The GPU: gradients of convolutions behind a max pooling are right for all shapes, as exact as float32 sums, and the
same in each run."""

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
from program_samples import everywhere
from sparse_pool_samples import Work, by_images, by_weights, conv_problem, drawn, equation, expected
from test_gpu_products import distance
from test_gpu_shifted_conv import ROUNDED, TOLERANCE, same

import adtrain as ad
from adtrain import ops
from adtrain.core.array import array
from adtrain.core.precision import FULL, PRECISIONS
from adtrain.core.staging import stage
from adtrain.passes import ALL

__all__ = ["gpu", "hopper", "poisoned"]

pytestmark = pytest.mark.gpu

M, N, K = 24, 20, 288


def computed(gpu: Any, work: Work) -> list[np.ndarray]:
    e = equation(work.form, work.problem)
    return run_twice(gpu, e.primitive, work.kernel, work.arrays, **e.params)


def check(gpu: Any, *found: Work | None, device: str = "cpu") -> None:
    """Against float64 numbers that a device computes, where a GPU has none of the kernels under test."""
    exact: dict[str, list[np.ndarray]] = {}
    for work in found:
        if work is not None:
            tolerance = TOLERANCE if work.problem.precision == FULL else ROUNDED
            if work.form not in exact:
                exact[work.form] = expected(work, device)
            for result, right in zip(computed(gpu, work), exact[work.form], strict=True):
                assert same(result, right, tolerance), work.form


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    image=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(2, 19), st.integers(2, 19)),
    filters=st.integers(1, 140),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_input_gradients_of_all_shapes_are_right(
    gpu: Any, image: tuple[int, ...], filters: int, kernel: tuple[int, int], padding: tuple[int, int], precision: str
) -> None:
    padding = min(padding[0], kernel[0] - 1), min(padding[1], kernel[1] - 1)
    assume(all(n + 2 * p - k >= 1 for n, p, k in zip(image[2:], padding, kernel, strict=True)))
    problem = conv_problem(image, filters, kernel, padding, precision)
    _, w, g, where = drawn(problem)
    check(gpu, by_images(problem, w, g, where))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    image=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(4, 30), st.integers(4, 50)),
    filters=st.integers(1, 140),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_weight_and_bias_gradients_of_all_shapes_are_right(
    gpu: Any, image: tuple[int, ...], filters: int, padding: tuple[int, int], precision: str
) -> None:
    problem = conv_problem(image, filters, (3, 3), padding, precision)
    x, _, g, where = drawn(problem)
    check(gpu, *by_weights(problem, x, g, where))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "filters", "padding", "precision"),
    [
        *(((140, 32, 26, 26), 64, 0, precision) for precision in PRECISIONS),
        *(((9, 70, 31, 45), 33, 1, precision) for precision in PRECISIONS),
        ((2, 16, 5, 90), 130, 1, FULL),
        ((300, 64, 7, 7), 20, 2, FULL),
    ],
)
def test_large_sparse_gradients_are_right(
    gpu: Any, image: tuple[int, ...], filters: int, padding: int, precision: str
) -> None:
    problem = conv_problem(image, filters, (3, 3), (padding, padding), precision)
    x, w, g, where = drawn(problem)
    check(gpu, by_images(problem, w, g, where), *by_weights(problem, x, g, where), device="gpu")


def test_infinity_and_nan_propagate(gpu: Any) -> None:
    problem = conv_problem((3, 40, 12, 14), 70, (3, 3), (1, 1))
    x, w, g, where = drawn(problem)
    g[0, 3, 1, 2], g[1, 69, 4, 4], g[2, 2, 0, 0] = np.inf, np.nan, -np.inf
    check(gpu, by_images(problem, w, g, where), *by_weights(problem, x, g, where))


def test_they_are_as_exact_as_sequential_fma_sums(gpu: Any) -> None:
    """Of windows whose first positions are the largest, and a kernel of one element."""
    problem = conv_problem((1, N, 2, 2 * M), K, (1, 1), (0, 0))
    for case, (a, b) in cases(M, N, K).items():
        g, where = a.T.reshape(1, K, 1, M).copy(), np.zeros((1, K, 1, M), np.int32)
        work = by_images(problem, b.reshape(K, N, 1, 1), g, where)
        assert work is not None
        (spread,) = computed(gpu, work)
        assert not spread[0, :, 1].any()
        assert not spread[0, :, 0, 1::2].any()
        taken, right = errors(spread[0, :, 0, ::2].T, a, b), errors(sequential_fma(a, b), a, b)
        assert taken[0] <= max(NOISE * right[0], ROUNDINGS), case
        assert taken[1] <= max((DECADES if "decades" in case else NOISE) * right[1], ROUNDINGS), case


def test_a_program_uses_sparse_gradients_and_computes_the_same(gpu: Any) -> None:
    """The mask before the convolution is the epilogue of its input gradient."""
    problem = conv_problem((130, 32, 26, 26), 64, (3, 3), (0, 0))
    x, w, _, _ = drawn(problem)
    bias = np.linspace(-1, 1, 64, dtype=np.float32)

    def f(x: Any, w: Any, bias: Any) -> Any:
        def loss(x: Any, w: Any, bias: Any) -> Any:
            y = ops.relu(ops.conv2d(ops.relu(x), w, bias))
            return ops.sum(ops.square(ops.max_pool2d(y, 2)))

        return ad.grad(loss, (0, 1, 2))(x, w, bias)

    args = [array(v, device="gpu") for v in (x, w, bias)]
    staged = stage(f, ALL)
    found = [e.name for e in everywhere(staged.program(*args))]
    assert {"conv2d_input_grad_pooled", "conv2d_weight_grad_pooled_sum"} <= set(found)
    right = [v.numpy() for v in f(*(array(v.astype(float)) for v in (x, w, bias)))]
    for a, b in zip(staged(*args), right, strict=True):
        assert distance(a.numpy(), b) < TOLERANCE
