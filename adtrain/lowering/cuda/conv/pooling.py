"""The rules that choose kernels for a convolution followed by 2 x 2 max pooling, and for its gradients.

A rule returns a kernel only if it is estimated faster than separate kernels for convolution and pooling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from adtrain.core.kernel import CudaKernel
from adtrain.core.target import Target
from adtrain.lowering.cuda.conv.fp16x2_weight_grad import Fp16x2WeightGrad
from adtrain.lowering.cuda.conv.padded_index import PaddedIndex
from adtrain.lowering.cuda.conv.problem import Algorithm, ConvProblem
from adtrain.lowering.cuda.conv.rules import forward_problem, rank_forward, rank_input_grad, rank_weight_grad
from adtrain.lowering.cuda.conv.shifted import ShiftedConv
from adtrain.lowering.cuda.conv.shifted_fp16x2 import Fp16x2Conv
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad
from adtrain.lowering.cuda.conv.sparse_pool_input_grad import SparsePoolInputGrad

WINDOWS = (2, 2), (2, 2), (0, 0)
"""Kernel, stride and padding of the supported max pooling."""
POOLING_START, POOLING_ELEMENTS = 4000, 400
"""Cycles of a launch of pooling alone; elements that it reads per cycle."""

AnAlgorithm = TypeVar("AnAlgorithm", bound=Algorithm)


def conv2d_max_pool2d(
    target: Target, x: Any, w: Any, window: Any, precision: str, windows: Any
) -> Sequence[CudaKernel]:
    """The convolution with a pooling epilogue."""
    problem = forward_problem(x, w, window, precision)
    index = PaddedIndex(problem)
    if windows != WINDOWS or not index.supported(target):
        return []
    pooled = ShiftedConv(index, target, flipped=False, pooled=True).best()
    pooling = POOLING_START + math.prod(problem.outputs) / POOLING_ELEMENTS
    faster = _if_faster(pooled, rank_forward(problem, target), pooling)
    return faster.kernels() if faster else []


def conv2d_input_grad_pooled(
    target: Target,
    g: Any,
    where: Any,
    w: Any,
    window: Any,
    windows: Any,
    shape: Any,
    size: tuple[int, int],
    precision: str,
) -> Sequence[CudaKernel]:
    """The input gradient from the pooled gradient ``g`` as a 2:4 sparse operand."""
    images = (g.shape[0], w.shape[1] * window.groups, *size)
    problem = ConvProblem.of(images, shape, w.shape[2:], window, g.dtype, precision)
    if windows != WINDOWS or not PaddedIndex(problem).supported(target):
        return []
    pooled = SparsePoolInputGrad(PaddedIndex(problem.transposed()), target)
    faster = _if_faster(pooled if pooled.supported() else None, rank_input_grad(problem, target))
    return faster.kernels() if faster else []


def conv2d_weight_grad_pooled(
    target: Target,
    x: Any,
    g: Any,
    where: Any,
    window: Any,
    windows: Any,
    shape: Any,
    size: tuple[int, int],
    precision: str,
    axes: Sequence[int] = (),
) -> Sequence[CudaKernel]:
    """The weight gradient from ``g`` as a 2:4 sparse operand; and the sum of ``g`` over ``axes``, the bias gradient."""
    problem = ConvProblem.of(x.shape, shape, size, window, x.dtype, precision)
    index = PaddedIndex(problem)
    if windows != WINDOWS or not index.supported(target):
        return []
    pooled = ShiftedWeightGrad(index, target, pooled=True).best()
    faster = _if_faster(pooled, rank_weight_grad(problem, target))
    return replace(faster, bias=bool(axes)).kernels() if faster else []


def _if_faster(pooled: AnAlgorithm | None, ranked: Sequence[Algorithm], pooling: float = 0) -> AnAlgorithm | None:
    """``pooled`` if it is estimated no slower than the best other algorithm plus ``pooling`` cycles, else None.

    None also if that algorithm is not a shifted implicit GEMM.
    """
    best = next(iter(ranked), None)
    if pooled is None or not isinstance(best, (ShiftedConv, Fp16x2Conv, ShiftedWeightGrad, Fp16x2WeightGrad)):
        return None
    return pooled if pooled.cycles <= best.cycles + pooling else None
