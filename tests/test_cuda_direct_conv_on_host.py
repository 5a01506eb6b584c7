"""Direct convolutions: the kernels on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conv_samples import drawn
from cuda_on_host import Host, host
from program_samples import ON_GPU, fused_of

from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.weight_gradients import BIAS_AXES
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel
from adtrain.core.precision import rounded
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.direct import DirectConv, DirectWeightGrad
from adtrain.lowering.cuda.conv.problem import ConvProblem
from adtrain.ops.common import sum_p
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TOLERANCE = 5e-7
"""Of the norm of the difference over the norm."""

SHAPES = (
    ((3, 1, 9, 8), (11, 1, 3, 3), Window((1, 1), (0, 0), (1, 1), 1)),
    ((2, 3, 8, 7), (5, 3, 5, 5), Window((1, 1), (2, 2), (1, 1), 1)),
    ((2, 3, 13, 12), (9, 3, 7, 7), Window((2, 2), (3, 3), (1, 1), 1)),
    ((2, 6, 9, 11), (8, 3, 3, 2), Window((2, 1), (1, 0), (1, 2), 2)),
    ((2, 5, 6, 6), (5, 1, 3, 3), Window((1, 1), (1, 1), (1, 1), 5)),
    ((2, 4, 5, 4), (3, 4, 1, 1), Window((1, 1), (1, 1), (1, 1), 1)),
)


TARGET = H200._replace(multiprocessors=1)
"""With one multiprocessor a thread computes several outputs."""


def with_sum(arrays: list[np.ndarray], **params: Any) -> Equation:
    """The gradients by weights and by bias."""
    steps = [(weight_grad_p, (0, 1), params), (sum_p, (1,), {"axes": BIAS_AXES})]
    return fused_of("conv2d_weight_grad_sum", [ArrayType(x.shape, x.dtype) for x in arrays], steps, [2, 3])


def check(host: Host, primitive: Primitive, kernel: CudaKernel, arrays: list[np.ndarray], **params: Any) -> None:
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    types = primitive.output_types([v.type for v in inputs], params)
    e = Equation(primitive, inputs, params, tuple(Variable(t, "gpu") for t in types))
    wide = [rounded(x, params["precision"]).astype(float) for x in arrays]
    params = {**params, "precision": "full"}
    with np.errstate(invalid="ignore"):
        expected = primitive.reference(*wide, **params)
    compare(host.computed(e, kernel, arrays), [expected])


def compare(results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for found, exact in zip(results, expected, strict=True):
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(found), test(exact))
        held = np.isfinite(exact)
        assert np.linalg.norm(found[held] - exact[held]) <= TOLERANCE * np.linalg.norm(exact[held])


def check_all(host: Host, x: np.ndarray, w: np.ndarray, g: np.ndarray, window: Window, precision: str = "full") -> None:
    size = w.shape[2], w.shape[3]
    problem = ConvProblem(x.shape, g.shape, size, *window, precision=precision)
    params = {"window": window, "precision": precision}
    check(host, conv2d_p, DirectConv(problem, TARGET, False).kernels()[0], [x, w], **params)
    if window.stride == (1, 1):
        (kernel,) = DirectConv(problem.transposed(), TARGET, True).kernels()
        check(host, input_grad_p, kernel, [g, w], size=x.shape[2:], **params)
    check(host, weight_grad_p, DirectWeightGrad(problem, TARGET).kernels()[0], [x, g], size=size, **params)
    (kernel,) = DirectWeightGrad(problem, TARGET, bias=True).kernels()
    e = with_sum([x, g], size=size, **params)
    wide = [rounded(v, precision).astype(float) for v in (x, g)]
    with np.errstate(invalid="ignore"):
        of_weights = weight_grad_p.reference(*wide, size=size, window=window, precision="full")
        of_bias = g.astype(float).sum(BIAS_AXES)  # this is not a product, so nothing is rounded
    compare(host.computed(e, kernel, [x, g]), [of_weights, of_bias])


def outputs(image: tuple[int, ...], weight: tuple[int, ...], window: Window) -> tuple[int, ...]:
    return (image[0], weight[0], *(window.output_length(i, image[i + 2], weight[i + 2]) for i in (0, 1)))


@pytest.mark.parametrize(
    ("image", "weight", "window"),
    [pytest.param(*shape, marks=pytest.mark.exhaustive if shape in SHAPES[1::2] else ()) for shape in SHAPES],
)
def test_direct_convolutions_are_right(
    host: Host, image: tuple[int, ...], weight: tuple[int, ...], window: Window
) -> None:
    x, w, g = drawn(image, weight, outputs(image, weight, window))
    check_all(host, x, w, g, window)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["tf32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_operands_are_rounded_but_not_the_sum_for_the_bias(host: Host, precision: str) -> None:
    image, weight, window = SHAPES[1]
    x, w, g = drawn(image, weight, outputs(image, weight, window))
    check_all(host, x, w, g, window, precision)


@pytest.mark.exhaustive
def test_infinity_and_nan_propagate_as_in_float32_sums(host: Host) -> None:
    window = Window((1, 1), (1, 1), (1, 1), 1)
    x, w, g = drawn((2, 2, 6, 7), (3, 2, 3, 3), (2, 3, 6, 7))
    x[0, 1, 2, 3], x[1, 1, 5, 6], g[1, 2, 4, 5], g[0, 0, 0, 3] = np.inf, -np.inf, np.nan, np.inf
    check_all(host, x, w, g, window)


def test_epilogue_is_applied_once_to_each_element(host: Host) -> None:
    def layer(x: Any, w: Any, bias: Any, keep: Any) -> Any:
        return ops.relu(ops.conv2d(x, w, bias, padding=1) * keep)

    arrays = drawn((3, 2, 7, 6), (5, 2, 3, 3), (5,), (3, 1, 1, 1))
    program = stage(layer, ON_GPU).program(*(array(x) for x in arrays))
    (e,) = [e for e in program.equations if e.name == "convolution"]
    given = drawn(*(v.type.shape for v in e.inputs))
    problem = ConvProblem(arrays[0].shape, (3, 5, 7, 6), (3, 3), (1, 1), (1, 1), (1, 1))
    (found,) = host.computed(e, DirectConv(problem, TARGET, False).kernels()[0], given)
    expected = e.primitive.reference(*given, **e.params)
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)
