"""Gradients joined with the gradient of a bias: which equations are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from program_samples import ON_GPU, names

import adtrain as ad
from adtrain import ops
from adtrain.core.array import array
from adtrain.core.staging import stage
from adtrain.ops import bias_sums
from adtrain.passes.fuse_bias_gradients import BIAS_AXES


def gradients(padding: int, x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
    def loss(w: Any, b: Any, v: Any, c: Any) -> Any:
        y = ops.relu(ops.conv2d(x, w, b))
        return ops.sum(ops.square(ops.max_pool2d(ops.relu(ops.conv2d(y, v, c)), 2, 2, padding)))

    return ad.grad(loss, (0, 1, 2, 3))(w, b, v, c)


SHAPES = ((256, 1, 28, 28), (32, 1, 3, 3), (32,), (64, 32, 3, 3), (64,))


@pytest.mark.parametrize("padding", [0, 1])
def test_bias_gradients_join_the_gradient_that_reads_the_same(padding: int) -> None:
    rng = np.random.default_rng(0)
    args = [array(rng.standard_normal(shape).astype(np.float32)) for shape in SHAPES]
    found = names(stage(partial(gradients, padding), ON_GPU).program(*args))
    assert found.count("conv2d_weight_grad_sum") == 1  # of one channel
    assert found.count("conv2d_weight_grad_pooled_sum") == (padding == 0)
    assert found.count("conv2d_weight_grad") == found.count("sum") == (padding > 0)


def test_a_sum_of_other_axes_stays_alone() -> None:
    def f(x: Any, g: Any) -> Any:
        return ops.conv2d(ops.transpose(x, (1, 0, 2, 3)), ops.transpose(g, (1, 0, 2, 3))), ops.sum(g, (2, 3))

    x, g = (array(np.ones(shape, np.float32)) for shape in ((4, 1, 6, 6), (4, 8, 4, 4)))
    assert "sum" in names(stage(f, ON_GPU).program(x, g))


def test_the_pass_names_the_axes_of_a_bias_as_the_operations_do() -> None:
    assert BIAS_AXES == bias_sums.OF_BIAS
