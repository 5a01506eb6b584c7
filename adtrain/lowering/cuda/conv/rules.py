"""The rules that choose kernels for conv2d and its gradients; and implicit GEMM, for all shapes, types and GPUs
(`kernels/cuda/conv/implicit_gemm.cu`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from adtrain.core.errors import DeviceError
from adtrain.core.kernel import MAX_GRID, CudaKernel, CudaLaunch, Target
from adtrain.core.precision import FULL
from adtrain.lowering.cuda.conv.direct import DirectConv, DirectWeightGrad
from adtrain.lowering.cuda.conv.problem import MAX_PIXELS, Algorithm, ConvProblem, Direction, PaddedIndex
from adtrain.lowering.cuda.conv.shifted import ShiftedConv
from adtrain.lowering.cuda.conv.shifted_fp16x2 import Fp16x2Conv, Fp16x2WeightGrad
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad
from adtrain.lowering.cuda.gemm import MANY_MEMBERS
from adtrain.lowering.cuda.gemm.cost_model import FMA_LANES, TILED, Gathers, mma_kinds, ranked
from adtrain.lowering.cuda.gemm.tiles import MmaKind, Tile, with_split_k

MAX_TILES = 6
"""Candidate tiles for one convolution."""
MEMBER_ROWS, MEMBER_PIXELS = 32, 1 << 12
"""The rows of a product, and the pixels that are its columns, for which the tile and the splits are chosen in a Program
by member. There the rows can be the filters of all members, and the pixels those of all members' images."""
FMA_SPEED, MMA_SPEED = 0.6, 1.1
"""Throughput of a multiprocessor by FMA and by mma; 1 is the float32 FMA peak."""
TILE_STEP, FIXED_K = 16, 32
"""Granularity of a tile's rows and columns; a tile's fixed cost, as the K whose products take as long."""
MAX_TILE, GATHERED = 128, 1.6
"""Maximum of rows and columns of a tile; elements that a multiprocessor gathers per cycle, measured."""


@dataclass(frozen=True)
class ImplicitGemm:
    """A convolution as a matrix product for each group, whose operands are gathered from the images.

    Attributes:
        name: the kernel in `conv/implicit_gemm.cu`.
        lengths: M, N, K of the product.
        contiguous: how many of its columns are neighbours in memory.
        gathers: what its columns are.
        phases: number of products, each for some pixels of the images.
    """

    problem: ConvProblem
    target: Target
    name: str
    lengths: tuple[int, int, int]
    contiguous: int
    gathers: Gathers
    phases: int = 1

    @property
    def cycles(self) -> float:
        """An estimate of the time of the best tile."""
        kinds = mma_kinds(self.problem.dtype.itemsize, self.problem.precision, self.target.capability)
        *sides, k = self.lengths
        m, n = (-(-length // TILE_STEP) * TILE_STEP for length in sides)
        products = m * n * (k + FIXED_K) / (FMA_LANES * (FMA_SPEED if MmaKind.FMA in kinds else MMA_SPEED))
        gathered = n * -(-m // MAX_TILE) * k / GATHERED
        start = TILED.start
        if self.gathers is Gathers.ELEMENTS:
            gathered += m * -(-n // MAX_TILE) * k / GATHERED
            start += TILED.second_pass  # K is long, so it is split
        return start + self.problem.groups * self.phases * max(products, gathered) / self.target.multiprocessors

    def kernels(self) -> Sequence[CudaKernel]:
        """One for each tile; none where the problem is too large."""
        problem = self.problem
        if not problem.within_limits():
            return []
        batch, (m, n, k), max_tiles = problem.groups, self.lengths, MAX_TILES
        if self.target.by_member:
            batch, m, max_tiles = MANY_MEMBERS, MEMBER_ROWS, 1
            n = MEMBER_PIXELS if self.gathers is Gathers.PIXELS else n
        target, itemsize = self.target._replace(by_member=False), problem.dtype.itemsize
        found = ranked(itemsize, batch * self.phases, m, n, k, target, problem.precision, self.gathers)
        return [self._kernel(tile, splits) for tile, splits in found[:max_tiles] if isinstance(tile, Tile)]

    def _kernel(self, tile: Tile, splits: int) -> CudaKernel:
        problem, (m, n, _) = self.problem, self.lengths
        tiles, itemsize = -(-m // tile.m) * -(-n // tile.n), problem.dtype.itemsize
        wide = tile.store_width(itemsize, self.contiguous)
        pixels = self.gathers is Gathers.PIXELS
        lengths = (*problem.images, *problem.outputs[1:], problem.groups)  # CONV_NUMBERS
        multiply = CudaLaunch(
            "conv/implicit_gemm.cu",
            self.name,
            lengths if pixels else (*lengths, splits),
            (problem.dtype,),
            blocks=(tiles, problem.groups, self.phases) if pixels else (tiles, splits, problem.groups),
            threads=tile.threads,
            shared=tile.shared(itemsize),
            definitions={
                **{**problem.window_macros(), **tile.definitions(), "SPLIT": int(splits > 1), "WIDE_C": wide},
                "SHARED_BYTES": tile.shared(itemsize),
                "WEIGHT_GRAD": int(not pixels),
            },
        )
        size = 1, problem.outputs[1], problem.group_channels * problem.taps, splits
        return with_split_k(multiply, problem.dtype, *size, self.target.by_member)


def forward(problem: ConvProblem, target: Target) -> ImplicitGemm:
    """Rows are filters, columns the pixels of all outputs, K the channels and taps."""
    lengths = problem.group_filters, problem.pixels, problem.group_channels * problem.taps
    area = math.prod(problem.outputs[2:])
    return ImplicitGemm(problem, target, "conv2d", lengths, area, Gathers.PIXELS)


def input_grad(problem: ConvProblem, target: Target) -> ImplicitGemm:
    """Rows are channels, columns the images' pixels of one phase, K the filters and the phase's taps."""
    (count, _, *size), (sh, sw) = problem.images, problem.stride
    pixels = count * -(-size[0] // sh) * -(-size[1] // sw)
    lengths = problem.group_channels, pixels, -(-problem.group_filters * problem.taps // (sh * sw))
    contiguous = math.prod(size) if problem.unit_stride else 1  # the pixels of one phase are a stride apart
    return ImplicitGemm(problem, target, "conv2d_input_grad", lengths, contiguous, Gathers.PIXELS, sh * sw)


def weight_grad(problem: ConvProblem, target: Target) -> ImplicitGemm:
    """Rows are filters, columns the channels and taps, K the pixels of all outputs."""
    elements = problem.group_channels * problem.taps
    lengths = problem.group_filters, elements, problem.pixels
    return ImplicitGemm(problem, target, "conv2d_weight_grad", lengths, elements, Gathers.ELEMENTS)


IMPLICIT_GEMMS = {
    Direction.FORWARD: forward,
    Direction.INPUT_GRAD: input_grad,
    Direction.WEIGHT_GRAD: weight_grad,
}
NORMS_START, NORMS_ELEMENTS = 4000, 600
"""Cycles of a launch that adds squares; elements that it reads per cycle."""
MAX_SLOWDOWN = 2.0
"""An algorithm with more than this many times the cycles of implicit GEMM is not a candidate."""


def problem_of(direction: Direction, a: Any, b: Any, window: Any, size: tuple[int, ...], precision: str) -> ConvProblem:
    """The problem of a primitive's arguments: images and weights, gradients and weights, or images and gradients.

    Args:
        size: rows and columns of the images for an input gradient, of the window for a weight gradient.
    """
    if direction is Direction.FORWARD:
        lengths = (window.output_length(i, a.shape[i + 2], b.shape[i + 2]) for i in (0, 1))
        images, outputs, kernel = a.shape, (a.shape[0], b.shape[0], *lengths), b.shape[2:]
    elif direction is Direction.INPUT_GRAD:
        images, outputs, kernel = (a.shape[0], b.shape[1] * window.groups, *size), a.shape, b.shape[2:]
    else:
        images, outputs, kernel = a.shape, b.shape, size
    stride, padding, dilation, groups = window
    return ConvProblem(images, outputs, kernel, stride, padding, dilation, groups, a.dtype, precision)


def ranked_algorithms(direction: Direction, problem: ConvProblem, target: Target) -> Sequence[Algorithm]:
    """The algorithms for a convolution or gradient, the fastest by estimate first."""
    gemm = IMPLICIT_GEMMS[direction](problem, target)
    of_gemm = [gemm] if gemm.kernels() else []
    if target.by_member:  # the others choose by the number of members
        return of_gemm
    others = [x for x in _others(direction, problem, target) if x.cycles <= MAX_SLOWDOWN * gemm.cycles]
    others.sort(key=lambda x: x.cycles)
    faster = [x for x in others if x.cycles < gemm.cycles]
    return [*faster, *of_gemm, *others[len(faster) :]]


def _others(direction: Direction, problem: ConvProblem, target: Target) -> list[Algorithm]:
    """Shifted implicit GEMM with operands as bf16x3 and as fp16x2, and direct convolution, where supported."""
    flipped = direction is Direction.INPUT_GRAD
    if flipped and not problem.unit_stride:
        return []
    problem = problem.transposed() if flipped else problem
    index = PaddedIndex(problem)
    bf16x3: ShiftedConv | ShiftedWeightGrad | None
    others: tuple[Fp16x2Conv | Fp16x2WeightGrad, DirectConv | DirectWeightGrad]
    if direction is Direction.WEIGHT_GRAD:
        bf16x3 = ShiftedWeightGrad(index, target).best() if index.supported(target) else None
        others = Fp16x2WeightGrad(index, target), DirectWeightGrad(problem, target)
    else:
        bf16x3 = ShiftedConv(index, target, flipped).best() if index.supported(target) else None
        others = Fp16x2Conv(index, target, flipped), DirectConv(problem, target, flipped)
    return [*([bf16x3] if bf16x3 else []), *(x for x in others if x.supported())]


def candidates(
    direction: Direction,
    target: Target,
    a: Any,
    b: Any,
    window: Any,
    size: tuple[int, ...] = (),
    precision: str = FULL,
) -> list[CudaKernel]:
    """The kernels of a convolution or gradient. Raises DeviceError: the problem is too large for every algorithm."""
    problem = problem_of(direction, a, b, window, size, precision)
    algorithms = ranked_algorithms(direction, problem, target)
    if not algorithms and not problem.within_limits():
        name = IMPLICIT_GEMMS[direction](problem, target).name
        sizes = " and ".join("x".join(map(str, shape)) for shape in (problem.images, problem.outputs))
        raise DeviceError(
            f"{name}: images and outputs of {sizes} with stride {problem.stride} in {problem.groups} groups are too "
            f"large for the GPU: at most {MAX_PIXELS} pixels a channel, {MAX_GRID[1]} groups and steps of the stride"
        )
    return [replace(kernel, cycles=algorithm.cycles) for algorithm in algorithms for kernel in algorithm.kernels()]


conv2d, conv2d_input_grad, conv2d_weight_grad = (partial(candidates, direction) for direction in Direction)


def _one_image(x: Any, g: Any, window: Any) -> tuple[Any, Any, Any]:
    """Images and gradients as one image, and its window."""
    images, gradients = (t._replace(shape=(1, t.shape[0] * t.shape[1], *t.shape[2:])) for t in (x, g))
    return images, gradients, window._replace(groups=window.groups * x.shape[0])


def conv2d_weight_grad_by_image(target: Target, x: Any, g: Any, window: Any, **others: Any) -> list[CudaKernel]:
    """The kernels for the weight gradient of each image: those of one image, whose groups are the images, and shifted
    implicit GEMM with a split for each image."""
    found = conv2d_weight_grad(target, *_one_image(x, g, window), **others)
    index = PaddedIndex(problem_of(Direction.WEIGHT_GRAD, x, g, window, **others))
    runs = index.supported(target) and not target.by_member
    shifted = ShiftedWeightGrad(index, target, by_image=True).best() if runs else None
    made = [] if shifted is None else [replace(each, cycles=shifted.cycles) for each in shifted.kernels()]
    return sorted([*found, *made], key=lambda kernel: kernel.cycles or math.inf)


def image_norms(
    target: Target, x: Any, g: Any, *where: Any, axes: Sequence[int], windows: Any = None, **others: Any
) -> Sequence[CudaKernel]:
    """The kernels for the squared norms of the weight gradients of images.

    None if kernels that store the gradients, and one that adds their squares, are estimated faster.

    Args:
        where: the positions of a pooled gradient `g`. Then `windows` are those of the pooling, and ``shape`` in
            `others` is that of the gradient before it.
    """
    g = g._replace(shape=others.pop("shape", g.shape))
    index = PaddedIndex(problem_of(Direction.WEIGHT_GRAD, x, g, **others))
    if target.by_member or not index.supported(target):
        return []
    grad = ShiftedWeightGrad(index, target, pooled=bool(where), by_image=True, norms=True).best()
    if grad is None:
        return []
    if not where:
        elements = x.shape[0] * index.problem.weights
        stored = conv2d_weight_grad_by_image(target, x, g, **others)[0].cycles or math.inf
        if grad.cycles > stored + NORMS_START + elements / NORMS_ELEMENTS:
            return []
    return [replace(each, cycles=grad.cycles) for each in grad.kernels()]


def conv2d_weight_grad_sum(
    target: Target, x: Any, g: Any, window: Any, size: tuple[int, int], precision: str, axes: Sequence[int]
) -> Sequence[CudaKernel]:
    """Weight and bias gradient in one kernel, if direct convolution is the best for the weight gradient alone."""
    problem = problem_of(Direction.WEIGHT_GRAD, x, g, window, size, precision)
    best = next(iter(ranked_algorithms(Direction.WEIGHT_GRAD, problem, target)), None)
    return DirectWeightGrad(problem, target, bias=True).kernels() if isinstance(best, DirectWeightGrad) else []


def conv2d_weight_grad_by_image_sum(
    target: Target, x: Any, g: Any, window: Any, size: tuple[int, int], precision: str, axes: Sequence[int]
) -> Sequence[CudaKernel]:
    """The kernels for the weight and bias gradients of each image: those of one image, whose groups are the images."""
    return conv2d_weight_grad_sum(target, *_one_image(x, g, window), size, precision, axes)
