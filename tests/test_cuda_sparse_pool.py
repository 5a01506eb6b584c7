"""Gradients of convolutions behind a max pooling on Hopper, without a GPU: what the kernels compute, which Programs
have them, their arithmetic in NumPy, and compilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import NvrtcLog
from cuda_on_host import Host, host
from hypothesis import given
from hypothesis import strategies as st
from program_samples import ON_GPU, everywhere, names
from sparse_pool_samples import WINDOWS, Work, by_images, by_weights, conv_problem, drawn, equation, expected
from test_cuda_shifted_conv import check_compiled
from test_gpu_shifted_conv import same

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel, cuda_kernels
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.conv import Window

__all__ = ["host"]

MIN_PRODUCTS = H200._replace(multiprocessors=2)
"""A block takes several tiles."""


def computed(host: Host, work: Work) -> list[np.ndarray]:
    return host.computed(equation(work.form, work.problem), work.kernel, work.arrays)


def check(host: Host, work: Work) -> None:
    for found, right in zip(computed(host, work), expected(work), strict=True):
        assert same(found, right), work.form


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("image", "filters", "kernel", "padding"),
    [
        ((2, 5, 9, 8), 33, (3, 3), (0, 0)),  # two stages of filters, the last column of outputs in no window
        pytest.param(  # two tiles of channels, outputs that do not begin with a pair
            (2, 34, 8, 7), 9, (3, 3), (1, 1), marks=pytest.mark.exhaustive
        ),
        pytest.param((1, 4, 12, 11), 70, (5, 3), (2, 0), marks=pytest.mark.exhaustive),
        pytest.param((2, 3, 9, 13), 8, (3, 5), (1, 2), marks=pytest.mark.exhaustive),
        pytest.param((9, 3, 8, 8), 16, (1, 1), (0, 0), marks=pytest.mark.exhaustive),
    ],
)
def test_input_gradients_are_right(
    host: Host,
    image: tuple[int, ...],
    filters: int,
    kernel: tuple[int, int],
    padding: tuple[int, int],
) -> None:
    problem = conv_problem(image, filters, kernel, padding)
    _, w, g, where = drawn(problem)
    work = by_images(problem, w, g, where, MIN_PRODUCTS)
    assert work is not None
    check(host, work)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("image", "filters", "padding"),
    [
        ((2, 5, 9, 8), 33, (0, 0)),
        pytest.param((3, 8, 9, 40), 8, (1, 2), marks=pytest.mark.exhaustive),
        pytest.param((2, 34, 8, 7), 9, (1, 1), marks=pytest.mark.exhaustive),
    ],
)
def test_weight_and_bias_gradients_are_right(
    host: Host, image: tuple[int, ...], filters: int, padding: tuple[int, int]
) -> None:
    problem = conv_problem(image, filters, (3, 3), padding)
    x, _, g, where = drawn(problem)
    found = by_weights(problem, x, g, where, MIN_PRODUCTS)
    assert len(found) == 6
    for work in found:
        check(host, work)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_gradients_of_rounded_numbers_are_right(host: Host, precision: str) -> None:
    problem = conv_problem((2, 5, 9, 8), 33, (3, 3), (0, 0), precision)
    x, w, g, where = drawn(problem)
    for work in (by_images(problem, w, g, where), *by_weights(problem, x, g, where)):
        assert work is not None
        check(host, work)


@pytest.mark.exhaustive
def test_infinity_and_nan_propagate(host: Host) -> None:
    problem = conv_problem((2, 5, 9, 8), 33, (3, 3), (0, 0))
    x, w, g, where = drawn(problem)
    g[0, 3, 1, 2], g[1, 32, 2, 1], g[1, 2, 0, 0] = np.inf, np.nan, -np.inf
    for work in (by_images(problem, w, g, where, MIN_PRODUCTS), *by_weights(problem, x, g, where, MIN_PRODUCTS)):
        assert work is not None
        check(host, work)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 80), st.integers(6, 70), st.integers(6, 70)),
    st.integers(1, 140),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_the_launches_fit(
    image: tuple[int, ...], filters: int, kernel: tuple[int, int], padding: tuple[int, int]
) -> None:
    problem = conv_problem(image, filters, kernel, (min(padding[0], kernel[0] - 1), min(padding[1], kernel[1] - 1)))
    x, w, g, where = drawn(problem)
    found = [work for work in (by_images(problem, w, g, where),) if work]
    if kernel == (3, 3):
        found += by_weights(problem, x, g, where)
    for *_, made in found:
        assert all(launch.shared + 1024 <= H200.shared for launch in made.launches)


def test_sparse_gradients_are_chosen_for_few_channels_and_many_filters() -> None:
    def found(x: tuple[int, ...], filters: int, padding: int) -> list[bool]:
        problem = conv_problem(x, filters, (3, 3), (padding, padding))
        window = Window((1, 1), (padding, padding), (1, 1), 1)
        count, _, rows, columns = problem.outputs
        g = ArrayType((count, filters, rows // 2, columns // 2), np.dtype(np.float32))
        where = ArrayType(g.shape, np.dtype(np.int32))
        known: dict[str, Any] = {"window": window, "windows": WINDOWS, "shape": problem.outputs, "precision": "full"}
        w, images = (ArrayType(shape, g.dtype) for shape in ((filters, x[1], 3, 3), x))
        return [
            bool(cuda_kernels("conv2d_input_grad_pooled", H200, g, where, w, size=(x[2], x[3]), **known)),
            bool(cuda_kernels("conv2d_weight_grad_pooled", H200, images, g, where, size=(3, 3), **known)),
        ]

    assert found((128, 32, 26, 26), 64, 0) == found((1024, 32, 26, 26), 64, 0) == [True, True]
    assert found((128, 32, 32, 32), 64, 1) == [True, True]
    assert found((64, 64, 56, 56), 64, 1) == [False, True]
    assert found((128, 1, 28, 28), 32, 0) == [False, False]


SHAPES = ((256, 32, 26, 26), (64, 32, 3, 3), (64,))


def program(f: Any) -> Program:
    return stage(f, ON_GPU).program(*(array(np.ones(shape, np.float32)) for shape in SHAPES))


def loss(x: Any, w: Any, b: Any) -> Any:
    return ops.sum(ops.square(ops.max_pool2d(ops.relu(ops.conv2d(x, w, b)), 2)))


def test_programs_for_hopper_materialise_no_unpooled_gradient() -> None:
    made = program(ad.grad(loss, (0, 1, 2)))
    found = [e.name for e in everywhere(made)]
    assert {"conv2d_input_grad_pooled", "conv2d_weight_grad_pooled_sum"} <= set(found)
    assert not {"max_pool2d_put", "sum", "conv2d_input_grad", "conv2d_weight_grad"} & set(names(made))


def test_an_unpooled_gradient_that_others_read_is_read_by_all() -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        _, back = ad.vjp(lambda y: ops.sum(ops.square(ops.max_pool2d(y, 2))), ops.conv2d(x, w, b))
        (spread,) = back(array(np.float32(1)))
        return ops.conv_transpose2d(spread, w), ops.exp(spread)

    assert not any("grad_pooled" in e.name for e in everywhere(program(f)))


@pytest.mark.exhaustive
@pytest.mark.needs_nvrtc
def test_kernels_compile_without_spills_and_serialised_wgmma(nvrtc_log: NvrtcLog) -> None:
    made: list[CudaKernel] = []
    for image, filters, padding in (((128, 32, 26, 26), 64, 0), ((8, 40, 15, 13), 33, 1)):
        problem = conv_problem(image, filters, (3, 3), (padding, padding))
        x, w, g, where = drawn(problem)
        found = [by_images(problem, w, g, where), *by_weights(problem, x, g, where)]
        made += [work.kernel for work in found if work]
    check_compiled(nvrtc_log, made)
