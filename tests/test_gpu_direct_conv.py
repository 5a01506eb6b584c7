"""The GPU: direct convolutions are right, the same in each run, and as exact as float32 sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, poisoned
from test_cuda_direct_conv_on_host import SHAPES, outputs, with_sum
from test_gpu_products import distance, rounded

from adtrain.backends.cuda.forms.weight_gradients import BIAS_AXES
from adtrain.core.program import fused_p
from adtrain.lowering.cuda.conv.direct import DirectConv, DirectWeightGrad
from adtrain.lowering.cuda.conv.problem import ConvProblem
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-7
"""Of the norm of the difference over the norm."""

PLAIN = Window((1, 1), (0, 0), (1, 1), 1)
LARGE = (
    ((64, 1, 28, 28), (32, 1, 3, 3), PLAIN),
    ((128, 6, 14, 14), (16, 6, 5, 5), PLAIN),
    ((9, 16, 31, 33), (50, 16, 3, 3), Window((1, 1), (1, 1), (1, 1), 1)),
    ((5, 3, 61, 58), (64, 3, 7, 7), Window((2, 2), (3, 3), (1, 1), 1)),
    ((8, 64, 20, 20), (64, 1, 3, 3), Window((1, 1), (1, 1), (1, 1), 64)),
)


@pytest.mark.parametrize("precision", ["full", "bfloat16"])
@pytest.mark.parametrize(("image", "weight", "window"), [*SHAPES, *LARGE])
def test_direct_convolutions_are_right(
    gpu: Any, image: tuple[int, ...], weight: tuple[int, ...], window: Window, precision: str
) -> None:
    rng = np.random.default_rng(0)
    shapes = image, weight, outputs(image, weight, window)
    x, w, g = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    problem = ConvProblem(x.shape, g.shape, (weight[2], weight[3]), *window, precision=precision)
    target = gpu.lowering.target
    params: dict[str, Any] = {"window": window, "precision": "full"}
    exact = [rounded(v, precision).astype(float) for v in (x, w, g)]

    (found,) = run_twice(gpu, conv2d_p, DirectConv(problem, target, False).kernels()[0], [x, w], **params)
    assert distance(found, conv2d_p.reference(*exact[:2], **params)) < TOLERANCE
    if window.stride == (1, 1):
        sized = {**params, "size": image[2:]}
        (kernel,) = DirectConv(problem.transposed(), target, True).kernels()
        (found,) = run_twice(gpu, input_grad_p, kernel, [g, w], **sized)
        assert distance(found, input_grad_p.reference(*exact[:0:-1], **sized)) < TOLERANCE
    sized = {**params, "size": weight[2:]}
    expected = weight_grad_p.reference(*exact[::2], **sized)
    (found,) = run_twice(gpu, weight_grad_p, DirectWeightGrad(problem, target).kernels()[0], [x, g], **sized)
    assert distance(found, expected) < TOLERANCE
    (kernel,) = DirectWeightGrad(problem, target, bias=True).kernels()
    of_weights, of_bias = run_twice(gpu, fused_p, kernel, [x, g], **with_sum([x, g], **sized).params)
    assert distance(of_weights, expected) < TOLERANCE
    assert distance(of_bias, g.astype(float).sum(BIAS_AXES)) < TOLERANCE
