"""The rules that choose kernels for conv2d and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adtrain.core.errors import DeviceError
from adtrain.core.kernel import MAX_GRID, CudaKernel
from adtrain.core.precision import FULL
from adtrain.core.target import Target
from adtrain.lowering.cuda.conv import implicit_gemm
from adtrain.lowering.cuda.conv.direct import DirectConv, DirectWeightGrad
from adtrain.lowering.cuda.conv.implicit_gemm import ImplicitGemm
from adtrain.lowering.cuda.conv.problem import MAX_PIXELS, Algorithm, ConvProblem, PaddedIndex
from adtrain.lowering.cuda.conv.shifted import ShiftedConv
from adtrain.lowering.cuda.conv.shifted_fp16x2 import Fp16x2Conv, Fp16x2WeightGrad
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad

MAX_SLOWDOWN = 2.0
"""An algorithm with more than this many times the cycles of implicit GEMM is not a candidate."""


def forward_problem(x: Any, w: Any, window: Any, precision: str) -> ConvProblem:
    rows, columns = (window.output_length(i, x.shape[i + 2], w.shape[i + 2]) for i in (0, 1))
    outputs = (x.shape[0], w.shape[0], rows, columns)
    return ConvProblem.of(x.shape, outputs, w.shape[2:], window, x.dtype, precision)


def input_grad_problem(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> ConvProblem:
    images = (g.shape[0], w.shape[1] * window.groups, *size)
    return ConvProblem.of(images, g.shape, w.shape[2:], window, g.dtype, precision)


def weight_grad_problem(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str) -> ConvProblem:
    return ConvProblem.of(x.shape, g.shape, size, window, x.dtype, precision)


def rank_forward(problem: ConvProblem, target: Target) -> Sequence[Algorithm]:
    """The algorithms for a convolution, the fastest by estimate first."""
    direct = DirectConv(problem, target, flipped=False)
    others = [*shifted_convs(problem, target, False), *([direct] if direct.supported() else [])]
    return _ranked(implicit_gemm.forward(problem, target), others)


def rank_input_grad(problem: ConvProblem, target: Target) -> Sequence[Algorithm]:
    """The algorithms for the input gradient, the fastest by estimate first."""
    others: list[Algorithm] = []
    if problem.unit_stride:
        direct = DirectConv(problem.transposed(), target, flipped=True)
        others = [*shifted_convs(problem.transposed(), target, True), *([direct] if direct.supported() else [])]
    return _ranked(implicit_gemm.input_grad(problem, target), others)


def rank_weight_grad(problem: ConvProblem, target: Target) -> Sequence[Algorithm]:
    """The algorithms for the weight gradient, the fastest by estimate first."""
    direct = DirectWeightGrad(problem, target)
    others = [*shifted_weight_grads(problem, target), *([direct] if direct.supported() else [])]
    return _ranked(implicit_gemm.weight_grad(problem, target), others)


def shifted_convs(problem: ConvProblem, target: Target, flipped: bool) -> list[Algorithm]:
    """Shifted implicit GEMM with operands as bf16x3 and as fp16x2, where supported."""
    index = PaddedIndex(problem)
    if not index.supported(target):
        return []
    bf16x3, fp16x2 = ShiftedConv(index, target, flipped).best(), Fp16x2Conv(index, target, flipped)
    return [*([bf16x3] if bf16x3 else []), *([fp16x2] if fp16x2.supported() else [])]


def shifted_weight_grads(problem: ConvProblem, target: Target) -> list[Algorithm]:
    """The same for the weight gradient."""
    index = PaddedIndex(problem)
    if not index.supported(target):
        return []
    bf16x3, fp16x2 = ShiftedWeightGrad(index, target).best(), Fp16x2WeightGrad(index, target)
    return [*([bf16x3] if bf16x3 else []), *([fp16x2] if fp16x2.supported() else [])]


def _ranked(gemm: ImplicitGemm, others: Sequence[Algorithm]) -> Sequence[Algorithm]:
    if gemm.target.by_member:  # the others choose by the number of members
        return [gemm] if gemm.kernels() else []
    possible = sorted((x for x in others if x.cycles <= MAX_SLOWDOWN * gemm.cycles), key=lambda x: x.cycles)
    faster = [x for x in possible if x.cycles < gemm.cycles]
    return [*faster, *([gemm] if gemm.kernels() else []), *possible[len(faster) :]]


def _kernels(name: str, problem: ConvProblem, algorithms: Sequence[Algorithm]) -> list[CudaKernel]:
    """Raises DeviceError: the problem is too large for every algorithm."""
    if not algorithms and not problem.within_limits():
        sizes = " and ".join("x".join(map(str, shape)) for shape in (problem.images, problem.outputs))
        raise DeviceError(
            f"{name}: images and outputs of {sizes} with stride {problem.stride} in {problem.groups} groups are too "
            f"large for the GPU: at most {MAX_PIXELS} pixels a channel, {MAX_GRID[1]} groups and steps of the stride"
        )
    return [replace(kernel, cycles=algorithm.cycles) for algorithm in algorithms for kernel in algorithm.kernels()]


def conv2d(target: Target, x: Any, w: Any, window: Any, precision: str = FULL) -> list[CudaKernel]:
    problem = forward_problem(x, w, window, precision)
    return _kernels("conv2d", problem, rank_forward(problem, target))


def conv2d_input_grad(
    target: Target, g: Any, w: Any, window: Any, size: tuple[int, int], precision: str = FULL
) -> list[CudaKernel]:
    problem = input_grad_problem(g, w, window, size, precision)
    return _kernels("conv2d_input_grad", problem, rank_input_grad(problem, target))


def conv2d_weight_grad(
    target: Target, x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL
) -> list[CudaKernel]:
    problem = weight_grad_problem(x, g, window, size, precision)
    return _kernels("conv2d_weight_grad", problem, rank_weight_grad(problem, target))


def conv2d_weight_grad_sum(
    target: Target, x: Any, g: Any, window: Any, size: tuple[int, int], precision: str, axes: Sequence[int]
) -> Sequence[CudaKernel]:
    """Weight and bias gradient in one kernel, if direct convolution is the best for the weight gradient alone."""
    problem = weight_grad_problem(x, g, window, size, precision)
    best = next(iter(rank_weight_grad(problem, target)), None)
    return DirectWeightGrad(problem, target, bias=True).kernels() if isinstance(best, DirectWeightGrad) else []
