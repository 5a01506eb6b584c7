"""Convolutions and their gradients that share operands in halves (`kernels/cuda/scaled.cuh`): images and the outputs'
gradients are measured and laid out once, for two readers each.

They occur only in Programs optimised for a GPU, where a pass puts them in the place of others, and have no derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.array import ArrayType
from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import Primitive, no_flops
from adtrain.ops import conv_cuda
from adtrain.ops.conv import conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.halves_weight_grad_cuda import HalvesWeightGrad
from adtrain.ops.laid_cuda import Laid
from adtrain.ops.planes_cuda import PlaneConvolution
from adtrain.ops.planes_weight_grad_cuda import PlaneWeightGrad
from adtrain.ops.positions import Positions


def _positions(x: tuple[int, ...], y: tuple[int, ...], window: Any, size: tuple[int, int]) -> Positions:
    return Positions(x, y, size, window.padding, window.dilation)


def _laid_type(x: Any, y: tuple[int, ...], window: Any, size: tuple[int, int], turned: bool) -> ArrayType:
    return ArrayType((Laid(_laid_positions(x, y, window, size, turned)).bytes,), np.dtype(np.uint8))


def _laid_positions(x: Any, y: tuple[int, ...], window: Any, size: tuple[int, int], turned: bool) -> Positions:
    return _positions(y, x.shape, window, size).turned() if turned else _positions(x.shape, y, window, size)


in_halves_p = Primitive(
    "in_halves",
    _laid_type,
    {
        "cpu": lambda x, **params: np.zeros(_laid_type(x, **params).shape, np.uint8),
        "cuda": lambda x, **params: Laid(_laid_positions(x, **params)).kernel(),
    },
    flops=no_flops,
)
"""(x; y, window, size, turned): the images of a convolution to y's shape with a kernel of this size; or, turned, the
outputs' gradients, those of the images' shape y being computed of them. What it holds is for the kernels alone."""


def _forward(x: Any, laid: Any, w: Any, window: Any, precision: str) -> CudaKernel:
    y = conv2d_p.output_types((x, w), {"window": window, "precision": precision})[0]
    return PlaneConvolution(_positions(x.shape, y.shape, window, w.shape[2:]), False, True, True).kernel()


def _input_grad(g: Any, laid: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> CudaKernel:
    x = g.shape[0], w.shape[1], *size
    return PlaneConvolution(_positions(x, g.shape, window, w.shape[2:]).turned(), True, True, True).kernel()


def _weight_grad(
    x: Any, g: Any, laid_x: Any, laid_g: Any, window: Any, size: tuple[int, int], precision: str
) -> Sequence[CudaKernel]:
    """None where laying out does not pay: then nothing should be."""
    w = weight_grad_p.output_types((x, g), {"window": window, "size": size, "precision": precision})[0]
    best = (
        conv_cuda.forward(x, w, window, precision),
        conv_cuda.input_grad(g, w, window, x.shape[2:], precision),
        conv_cuda.weight_grad(x, g, window, size, precision),
    )
    positions = _positions(x.shape, g.shape, window, size)
    turned, shared = positions.turned(), HalvesWeightGrad(positions, apart=True)
    if not all(kernels and conv_cuda.by_positions(kernels[0]) for kernels in best) or not shared.suits():
        return []
    ways = [
        [PlaneConvolution(positions, False, halves) for halves in (False, True)],
        [PlaneConvolution(turned, True, halves) for halves in (False, True)],
        [PlaneWeightGrad(positions), HalvesWeightGrad(positions)],
    ]
    apart = PlaneConvolution(positions, False, True, True), PlaneConvolution(turned, True, True, True), shared
    if not all(way.suits() for way in apart):
        return []
    laid = sum(Laid(each).cycles for each in (positions, turned))
    alone = sum(min(way.cycles for way in each if way.suits()) for each in ways)  # type: ignore[attr-defined]
    return [shared.kernel()] if laid + sum(way.cycles for way in apart) < alone else []


conv2d_laid_p = Primitive(
    "conv2d_laid",
    lambda x, laid, w, **params: conv2d_p.output_types((x, w), params)[0],
    {"cpu": lambda x, laid, w, **params: conv2d_p.implementations["cpu"](x, w, **params), "cuda": _forward},
    flops=lambda x, laid, w, **params: conv2d_p.cost([x, w], params).flops,
)
"""(x, laid, w; window, precision): conv2d(x, w, ...)."""

input_grad_laid_p = Primitive(
    "conv2d_input_grad_laid",
    lambda g, laid, w, **params: input_grad_p.output_types((g, w), params)[0],
    {"cpu": lambda g, laid, w, **params: input_grad_p.implementations["cpu"](g, w, **params), "cuda": _input_grad},
    flops=lambda g, laid, w, **params: input_grad_p.cost([g, w], params).flops,
)
"""(g, laid, w; window, size, precision): conv2d_input_grad(g, w, ...)."""

weight_grad_laid_p = Primitive(
    "conv2d_weight_grad_laid",
    lambda x, g, laid_x, laid_g, **params: weight_grad_p.output_types((x, g), params)[0],
    {
        "cpu": lambda x, g, laid_x, laid_g, **params: weight_grad_p.implementations["cpu"](x, g, **params),
        "cuda": _weight_grad,
    },
    flops=lambda x, g, laid_x, laid_g, **params: weight_grad_p.cost([x, g], params).flops,
)
"""(x, g, laid_x, laid_g; window, size, precision): conv2d_weight_grad(x, g, ...)."""
