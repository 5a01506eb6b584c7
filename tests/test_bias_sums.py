"""Weight gradients joined with the gradient of a bias, or with their squared norms: which equations are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from program_samples import ON_GPU, names
from test_passes_gpu import evaluated

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.weight_gradients import BIAS_AXES
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.array import array
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.curvature import FACTORED
from adtrain.ops.conv import Window, weight_grad_p


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


def test_a_sum_of_the_images_stays_alone() -> None:
    x, w = (np.ones(shape, np.float32) for shape in SHAPES[:2])

    def f(x: Any, w: Any) -> Any:
        of_weights = ad.grad(lambda w: ops.sum(ops.square(ops.conv2d(x, w))))(w)
        return of_weights, ops.sum(x, (0, 2, 3))

    found = names(stage(f, ON_GPU).program(array(x), array(w)))
    assert "conv2d_weight_grad" in found
    assert "sum" in found


def test_joined_gradients_are_those_of_eager_code() -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return ad.grad(lambda w, b: ops.sum(ops.square(ops.conv2d(x, w, b))), (0, 1))(w, b)

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES[:3]]
    program = stage(f, ON_GPU).program(*map(array, arrays))
    assert "conv2d_weight_grad_sum" in names(program)
    for found, expected in zip(evaluated(program, arrays), f(*map(array, arrays)), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5 * np.abs(expected.numpy()).max())


def test_a_kernel_gets_an_array_twice_that_is_image_and_gradient() -> None:
    def f(x: Any) -> Any:
        window = Window((1, 1), (0, 0), (1, 1), 1)
        return bind(weight_grad_p, x, x, window=window, size=(1, 1), precision="full"), ops.sum(x, BIAS_AXES)

    (e,) = stage(f, ON_GPU).program(array(np.ones((256, 1, 8, 8), np.float32))).equations
    assert e.name == "conv2d_weight_grad_sum"
    assert len(e.inputs) == 2
    (launch, *_) = Lowering(H200).launches(e)
    assert isinstance(launch, LaunchPlan)
    assert len(launch.operands) == 4


def squares_of_images(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
    """The squared norms of the gradients of each image by the parameters of two layers, the second one pooled."""

    def loss(params: Any, image: Any) -> Any:
        w, b, v, c = params
        y = ops.relu(ops.conv2d(ops.reshape(image, (1, *image.shape)), w, b))
        return ops.sum(ops.square(ops.max_pool2d(ops.relu(ops.conv2d(y, v, c)), 2)))

    return [ops.sum(g * g, tuple(range(1, g.ndim))) for g in ad.per_example_grad(loss)((w, b, v, c), x)]


def test_norms_of_gradients_of_images_join_the_gradients() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    found = names(stage(squares_of_images, (*FACTORED, *gpu_fusions(H200))).program(*map(array, arrays)))
    assert found.count("conv2d_weight_grad_by_image_sum") == 1  # of one channel
    assert found.count("conv2d_weight_grad_by_image_pooled_norms") == 1
    assert "max_pool2d_put" not in found


def test_gradients_of_images_that_are_needed_elsewhere_are_stored() -> None:
    def f(x: Any, g: Any) -> Any:
        of_one = ad.grad(lambda w, x, g: ops.sum(ops.conv2d(x[None], w) * g[None]))
        found = ad.vmap(of_one, (None, 0, 0))(ops.zeros((64, 32, 3, 3), "float32", x.device), x, g)
        return found, ops.sum(found * found, (1, 2, 3, 4))

    x, g = (array(np.ones(shape, np.float32)) for shape in ((256, 32, 26, 26), (256, 64, 24, 24)))
    assert not any(name.endswith("_norms") for name in names(stage(f, (*FACTORED, *gpu_fusions(H200))).program(x, g)))
