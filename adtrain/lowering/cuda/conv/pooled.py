"""The CUDA kernels for convolutions with a max pooling behind them, and for their gradients, where these should be
faster than one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from adtrain.core.kernel import LegacyKernel
from adtrain.core.precision import FULL
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.conv import (
    Convolution,
    Engine,
    by_positions,
    convolution,
    forward,
    input_grad,
    weight_grad,
    weight_grads,
)
from adtrain.lowering.cuda.conv.shifted import PlaneConvolution
from adtrain.lowering.cuda.conv.shifted_weight_grad import PlaneWeightGrad
from adtrain.lowering.cuda.conv.sparse_pool import PooledInputGrad

WINDOWS = (2, 2), (2, 2), (0, 0)
"""Window, stride and padding of a max pooling that a convolution can hand its elements to."""
POOLING, POOLED = 4000, 400
"""Cycles of the launch of such a pooling alone; elements that it reads in a cycle."""

AnEngine = TypeVar("AnEngine", bound=Engine)


def forward_pooled(x: Any, w: Any, window: Any, precision: str, windows: Any) -> Sequence[LegacyKernel]:
    """The kernel for a convolution with a max pooling of what its elements become, where that should be faster than one
    after the other: of windows of 2 x 2, where the convolution is computed by positions anyway."""
    conv = convolution(x, w, window, precision)
    positions = conv.positions()
    if positions is None or windows != WINDOWS:
        return []
    pooled = PlaneConvolution(positions, False, pooled=True).fitted()
    apart = POOLING + math.prod(conv.y) / POOLED
    faster = _faster(forward(x, w, window, precision), by_positions(positions, False), pooled, apart)
    return [faster.kernel()] if faster else []


def input_grad_pooled(
    g: Any, where: Any, w: Any, window: Any, windows: Any, shape: Any, size: tuple[int, int], precision: str
) -> Sequence[LegacyKernel]:
    """The kernel for the gradient by the images behind a max pooling of windows of 2 x 2, where that should be faster
    than the one that is computed by positions otherwise."""
    positions = Convolution((g.shape[0], w.shape[1], *size), w.shape, shape, window, g.dtype, precision).positions()
    if positions is None or windows != WINDOWS:
        return []
    turned = positions.turned()
    alone, pooled = input_grad(ArrayType(shape, g.dtype), w, window, size, precision), PooledInputGrad(turned)
    faster = _faster(alone, by_positions(turned, True), pooled if pooled.suits() else None)
    return [faster.kernel()] if faster else []


def weight_grad_pooled(
    x: Any,
    g: Any,
    where: Any,
    window: Any,
    windows: Any,
    shape: Any,
    size: tuple[int, int],
    precision: str,
    bias: bool = False,
) -> Sequence[LegacyKernel]:
    """The same for the gradient by the weights, or by weights and bias."""
    positions = Convolution(x.shape, (shape[1], x.shape[1], *size), shape, window, x.dtype, precision).positions()
    whole = precision == FULL or not bias  # a bias' gradient is of what is not rounded
    if positions is None or windows != WINDOWS or not whole:
        return []
    alone = weight_grad(x, ArrayType(shape, g.dtype), window, size, precision)
    faster = _faster(alone, weight_grads(positions), PlaneWeightGrad(positions, pooled=True).fitted())
    return [replace(faster, bias=bias).kernel()] if faster else []


def _faster(
    alone: Sequence[LegacyKernel], engines: Sequence[Engine], pooled: AnEngine | None, apart: float = 0
) -> AnEngine | None:
    """What has to do with a pooling, if it should be no slower than the one of ``engines`` that is taken ``alone``, and
    the cycles of what that leaves ``apart``."""
    taken = (engine for engine in engines if alone and engine.kernel().file == alone[0].file)
    return pooled if pooled and pooled.cycles <= next((engine.cycles + apart for engine in taken), -1) else None
