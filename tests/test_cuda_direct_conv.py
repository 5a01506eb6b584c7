"""Direct convolutions: how work is divided, and when the rule chooses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adtrain.backends.cuda import H200
from adtrain.core.kernel import cuda_kernels
from adtrain.core.precision import PRECISIONS
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.direct import SUMS, WEIGHT_GRAD_SUMS, WEIGHT_GRAD_THREADS, DirectConv, DirectWeightGrad
from adtrain.lowering.cuda.conv.problem import ConvProblem
from adtrain.ops.conv import Window

STATIC_SHARED = 48 << 10
"""Bytes of shared memory that a kernel can have without an attribute."""
STAGES = 3
"""Of the weight gradient in `conv/direct.cu`."""


@st.composite
def convolutions(draw: Any) -> ConvProblem:
    groups, channels, filters = draw(st.integers(1, 4)), draw(st.integers(1, 20)), draw(st.integers(1, 70))
    kernel = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    images = draw(st.integers(1, 2000))
    outputs = images, groups * filters, rows, columns
    return ConvProblem((images, groups * channels, rows, columns), outputs, kernel, (1, 1), (3, 3), (1, 1), groups)


@given(convolutions())
def test_threads_of_a_convolution_share_its_filters_and_hold_their_weights(problem: ConvProblem) -> None:
    direct = DirectConv(problem, H200, False)
    assume(direct.supported())
    assert direct.filters * (direct.filter_blocks - 1) < problem.group_filters <= direct.filters * direct.filter_blocks
    assert direct.filters * direct.wide <= SUMS
    assert problem.group_channels * problem.taps * -(-direct.filters // 4) * 4 * 4 <= STATIC_SHARED
    assert problem.outputs[3] % direct.wide == 0


@given(convolutions(), st.booleans())
def test_warps_of_a_weight_gradient_share_its_outputs(problem: ConvProblem, bias: bool) -> None:
    direct = DirectWeightGrad(problem, H200, bias)
    assume(direct.supported())
    wide = direct.kernels()[0].launches[0].definitions["WIDE_C"]
    assert direct.filters * (problem.taps + bias) <= WEIGHT_GRAD_SUMS
    assert 1 <= direct.splits <= -(-problem.pixels // 32)
    assert STAGES * direct.filters * WEIGHT_GRAD_THREADS * 4 * wide <= STATIC_SHARED


def first_files(
    image: tuple[int, ...], weight: tuple[int, ...], window: Window, precision: str = "full", dtype: str = "float32"
) -> list[str]:
    """The files of the kernels that the rule takes for a convolution and its gradients."""
    size = (window.output_length(0, image[2], weight[2]), window.output_length(1, image[3], weight[3]))
    x, w, g = (ArrayType(shape, np.dtype(dtype)) for shape in (image, weight, (image[0], weight[0], *size)))
    params: dict[str, Any] = {"window": window, "precision": precision}
    found = (
        cuda_kernels("conv2d", H200, x, w, **params),
        cuda_kernels("conv2d_input_grad", H200, g, w, size=(image[2], image[3]), **params),
        cuda_kernels("conv2d_weight_grad", H200, x, g, size=(weight[2], weight[3]), **params),
    )
    return [kernels[0].launches[0].file for kernels in found]


PLAIN = Window((1, 1), (0, 0), (1, 1), 1)
DIRECT = ["conv/direct.cu", "conv/direct.cu", "conv/direct.cu"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_few_channels_are_direct_convolutions(precision: str) -> None:
    assert first_files((1024, 1, 28, 28), (32, 1, 3, 3), PLAIN, precision) == DIRECT
    assert first_files((128, 6, 14, 14), (16, 6, 5, 5), PLAIN) == DIRECT
    assert first_files((64, 64, 56, 56), (64, 1, 3, 3), Window((1, 1), (1, 1), (1, 1), 64)) == DIRECT


def test_float64_is_implicit_gemm() -> None:
    found = first_files((1024, 1, 28, 28), (32, 1, 3, 3), PLAIN, dtype="float64")
    assert found == ["conv/implicit_gemm.cu"] * 3


def test_many_channels_are_not_direct_convolutions() -> None:
    assert not {*DIRECT} & {*first_files((256, 64, 56, 56), (64, 64, 3, 3), PLAIN)}
    assert not {*DIRECT} & {*first_files((1024, 32, 26, 26), (64, 32, 3, 3), PLAIN)}
