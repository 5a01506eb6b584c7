"""Gradients of convolutions behind a max pooling of windows of 2 x 2, for the tests of their kernels."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from adtrain.core.kernel import CudaKernel
from adtrain.core.precision import FULL
from adtrain.core.primitive import Primitive
from adtrain.core.target import H200, Target
from adtrain.lowering.cuda.conv.padded_index import PaddedIndex
from adtrain.lowering.cuda.conv.problem import ConvProblem
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad
from adtrain.lowering.cuda.conv.sparse_pool_input_grad import SparsePoolInputGrad
from adtrain.ops.bias_sums import conv2d_weight_grad_pooled_sum_p
from adtrain.ops.conv import Window
from adtrain.ops.conv_pooled import conv2d_input_grad_pooled_p, conv2d_weight_grad_pooled_p
from adtrain.ops.pool import Windows
from adtrain.ops.rounding import rounded

WINDOWS = Windows((2, 2), (2, 2), (0, 0))
Work: TypeAlias = "tuple[Primitive, list[np.ndarray], dict[str, Any], CudaKernel]"
"""A gradient, its arguments, and a kernel for it."""


def conv_problem(
    image: tuple[int, ...], filters: int, kernel: tuple[int, int], padding: tuple[int, int], precision: str = FULL
) -> ConvProblem:
    size = [n + 2 * p - k + 1 for n, p, k in zip(image[2:], padding, kernel, strict=True)]
    return ConvProblem(image, (image[0], filters, *size), kernel, (1, 1), padding, (1, 1), precision=precision)


def drawn(problem: ConvProblem, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Images, weights, a pooled gradient, and where in their windows its numbers are."""
    rng = np.random.default_rng(seed)
    (count, filters, rows, columns), channels = problem.outputs, problem.images[1]
    pooled = (count, filters, rows // 2, columns // 2)
    shapes = (problem.images, (filters, channels, *problem.kernel), pooled)
    x, w, g = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return x, w, g, rng.integers(0, 4, pooled).astype(np.int32)


def params(problem: ConvProblem, size: tuple[int, ...]) -> dict[str, Any]:
    return {
        "window": Window((1, 1), problem.padding, problem.dilation, 1),
        "windows": WINDOWS,
        "shape": problem.outputs,
        "size": size,
        "precision": problem.precision,
    }


def by_images(
    problem: ConvProblem, w: np.ndarray, g: np.ndarray, where: np.ndarray, target: Target = H200
) -> Work | None:
    """The gradient by the images, where it is supported."""
    grad = SparsePoolInputGrad(PaddedIndex(problem.transposed()), target)
    known = params(problem, problem.images[2:])
    return (conv2d_input_grad_pooled_p, [g, where, w], known, grad.kernels()[0]) if grad.supported() else None


def by_weights(
    problem: ConvProblem, x: np.ndarray, g: np.ndarray, where: np.ndarray, target: Target = H200
) -> list[Work]:
    """The gradients by weights, and by weights and bias, with all supported stages."""
    arrays, known = [x, g, where], params(problem, problem.kernel)
    index = PaddedIndex(problem)
    found: list[Work] = []
    for bias in (False, True):
        primitive = conv2d_weight_grad_pooled_sum_p if bias else conv2d_weight_grad_pooled_p
        choices = ShiftedWeightGrad(index, target, pooled=True, bias=bias).choices()
        found += [(primitive, arrays, known, grad.kernels()[0]) for grad in choices if grad.supported()]
    return found


def expected(primitive: Primitive, arrays: list[np.ndarray], known: dict[str, Any]) -> list[np.ndarray]:
    """In float64, of rounded numbers."""
    wide = [rounded(v, known["precision"]).astype(float) if v.dtype.kind == "f" else v for v in arrays]
    with np.errstate(invalid="ignore"):
        found = primitive.reference(*wide, **{**known, "precision": FULL})
    return list(found) if isinstance(found, tuple) else [found]
