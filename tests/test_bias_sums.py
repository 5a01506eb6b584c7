"""Gradients joined with the gradient of a bias: which equations are, and what the kernel of a pooling computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host
from program_samples import ON_GPU, for_gpu, names

import adtrain as ad
from adtrain import ops
from adtrain.core.array import array
from adtrain.core.program import Equation, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.staging import stage
from adtrain.core.target import H200
from adtrain.core.types import ArrayType
from adtrain.ops import bias_sums
from adtrain.ops.bias_sums import max_pool2d_put_sum_p
from adtrain.ops.pool import Windows, max_pool2d_put_p
from adtrain.passes.fuse_bias_gradients import BIAS_AXES

POOLINGS = (
    ((5, 3, 6, 8), Windows((2, 2), (2, 2), (0, 0))),
    ((2, 3, 7, 9), Windows((2, 2), (2, 2), (0, 0))),
    ((2, 2, 7, 9), Windows((3, 3), (2, 2), (0, 0))),
    ((3, 2, 5, 6), Windows((2, 3), (1, 1), (0, 0))),
    ((2, 3, 9, 11), Windows((2, 2), (3, 3), (0, 0))),
)


def put_arguments(shape: tuple[int, ...], windows: Windows, dtype: str = "float32") -> list[np.ndarray]:
    """A pooled gradient and positions."""
    rng = np.random.default_rng(0)
    pooled = windows.output_shape("", shape)
    where = rng.integers(0, windows.kernel[0] * windows.kernel[1], pooled).astype(np.int32)
    return [rng.standard_normal(pooled).astype(dtype), where]


@pytest.mark.parametrize(("shape", "windows"), POOLINGS)
def test_what_is_put_is_summed(tmp_path: Path, shape: tuple[int, ...], windows: Windows) -> None:
    arrays, params = put_arguments(shape, windows), {"windows": windows, "shape": shape}
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    types = max_pool2d_put_sum_p.output_types([v.type for v in inputs], params)
    e = Equation(max_pool2d_put_sum_p, inputs, params, tuple(Variable(t, "gpu") for t in types))
    (kernel,) = cuda_kernels("max_pool2d_put_sum", H200, *(v.type for v in inputs), **params)
    spread, sums = Host(tmp_path).computed(e, kernel, arrays)
    np.testing.assert_allclose(spread, max_pool2d_put_p.reference(*arrays, **params), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sums, arrays[0].sum((0, 2, 3)), rtol=1e-5)


def gradients(padding: int, x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
    def loss(w: Any, b: Any, v: Any, c: Any) -> Any:
        y = ops.relu(ops.conv2d(x, w, b))
        return ops.sum(ops.square(ops.max_pool2d(ops.relu(ops.conv2d(y, v, c)), 2, 2, padding)))

    return ad.grad(loss, (0, 1, 2, 3))(w, b, v, c)


SHAPES = ((256, 1, 28, 28), (32, 1, 3, 3), (32,), (64, 32, 3, 3), (64,))


@pytest.mark.parametrize("padding", [0, 1])
def test_sums_are_taken_by_who_reads_the_same(padding: int) -> None:
    rng = np.random.default_rng(0)
    args = [array(rng.standard_normal(shape).astype(np.float32)) for shape in SHAPES]
    found = names(stage(partial(gradients, padding), ON_GPU).program(*args))
    assert found.count("conv2d_weight_grad_sum") == 1  # of one channel
    assert found.count("conv2d_weight_grad_pooled_sum") == (padding == 0)
    assert found.count("conv2d_weight_grad") == found.count("sum") == (padding > 0)


def test_the_sum_of_a_gradient_that_is_spread_is_taken_while_it_is() -> None:
    args = [array(np.ones(shape, np.float32)) for shape in SHAPES]
    target = H200._replace(capability=(10, 0))  # without kernels for pooled gradients
    found = names(for_gpu(stage(partial(gradients, 0)).program(*args), target))
    assert found.count("max_pool2d_put_sum") == 1
    assert "sum" not in found


def test_a_sum_of_other_axes_stays_alone() -> None:
    def f(x: Any, g: Any) -> Any:
        return ops.conv2d(ops.transpose(x, (1, 0, 2, 3)), ops.transpose(g, (1, 0, 2, 3))), ops.sum(g, (2, 3))

    x, g = (array(np.ones(shape, np.float32)) for shape in ((4, 1, 6, 6), (4, 8, 4, 4)))
    assert "sum" in names(stage(f, ON_GPU).program(x, g))


def test_the_pass_names_the_axes_of_a_bias_as_the_operations_do() -> None:
    assert BIAS_AXES == bias_sums.OF_BIAS
