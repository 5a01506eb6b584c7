"""Gradients of convolutions behind a max pooling of windows of 2 x 2, for the tests of their kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from adtrain.core.kernel import CudaKernel
from adtrain.core.precision import FULL
from adtrain.core.primitive import Primitive
from adtrain.lowering.cuda.conv.padded_index import Positions
from adtrain.lowering.cuda.conv.shifted_weight_grad import PlaneWeightGrad
from adtrain.lowering.cuda.conv.sparse_pool import PooledInputGrad
from adtrain.ops.bias_sums import conv2d_weight_grad_pooled_sum_p
from adtrain.ops.conv import Window
from adtrain.ops.conv_pooled import conv2d_input_grad_pooled_p, conv2d_weight_grad_pooled_p
from adtrain.ops.pool import Windows
from adtrain.ops.rounding import rounded

WINDOWS = Windows((2, 2), (2, 2), (0, 0))
Work: TypeAlias = "tuple[Primitive, list[np.ndarray], dict[str, Any], CudaKernel]"
"""A gradient, its arguments, and a kernel for it."""


def positions_of(
    image: tuple[int, ...], filters: int, kernel: tuple[int, int], padding: tuple[int, int], precision: str = FULL
) -> Positions:
    size = [n + 2 * p - k + 1 for n, p, k in zip(image[2:], padding, kernel, strict=True)]
    return Positions(image, (image[0], filters, *size), kernel, padding, (1, 1), precision)


def drawn(positions: Positions, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Images, weights, a pooled gradient, and where in their windows its numbers are."""
    rng = np.random.default_rng(seed)
    (count, filters, rows, columns), channels = positions.outputs, positions.images[1]
    pooled = (count, filters, rows // 2, columns // 2)
    shapes = (positions.images, (filters, channels, *positions.kernel), pooled)
    x, w, g = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return x, w, g, rng.integers(0, 4, pooled).astype(np.int32)


def params(positions: Positions, size: tuple[int, ...]) -> dict[str, Any]:
    return {
        "window": Window((1, 1), positions.padding, positions.dilation, 1),
        "windows": WINDOWS,
        "shape": positions.outputs,
        "size": size,
        "precision": positions.precision,
    }


def by_images(positions: Positions, w: np.ndarray, g: np.ndarray, where: np.ndarray) -> Work | None:
    """The gradient by the images, where its kernel suits."""
    grad = PooledInputGrad(positions.turned())
    known = params(positions, positions.images[2:])
    return (conv2d_input_grad_pooled_p, [g, where, w], known, grad.kernel()) if grad.suits() else None


def by_weights(positions: Positions, x: np.ndarray, g: np.ndarray, where: np.ndarray) -> list[Work]:
    """The gradients by weights, and by weights and bias where numbers are not rounded, with all stages that suit."""
    arrays, known = [x, g, where], params(positions, positions.kernel)
    suiting = [grad for grad in PlaneWeightGrad(positions, pooled=True).choices() if grad.suits()]
    alone: list[Work] = [(conv2d_weight_grad_pooled_p, arrays, known, grad.kernel()) for grad in suiting]
    both = [replace(grad, bias=True).kernel() for grad in suiting if positions.precision == FULL]
    return [*alone, *((conv2d_weight_grad_pooled_sum_p, arrays, known, kernel) for kernel in both)]


def expected(primitive: Primitive, arrays: list[np.ndarray], known: dict[str, Any]) -> list[np.ndarray]:
    """In float64, of rounded numbers."""
    wide = [rounded(v, known["precision"]).astype(float) if v.dtype.kind == "f" else v for v in arrays]
    with np.errstate(invalid="ignore"):
        found = primitive.reference(*wide, **{**known, "precision": FULL})
    return list(found) if isinstance(found, tuple) else [found]
