"""Convolutions by implicit GEMM (`kernels/cuda/conv/implicit_gemm.cuh`), for all shapes, types and GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.target import Target
from adtrain.lowering.cuda.conv.problem import ConvProblem
from adtrain.lowering.cuda.gemm.cost_model import FMA_LANES, TILED, Gathers, mma_kinds, ranked
from adtrain.lowering.cuda.gemm.matmul import MANY_MEMBERS
from adtrain.lowering.cuda.gemm.split_k import with_split_k
from adtrain.lowering.cuda.gemm.tiles import MmaKind, Tile

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
        file, name: the kernel.
        lengths: M, N, K of the product.
        contiguous: how many of its columns are neighbours in memory.
        gathers: what its columns are.
        phases: number of products, each for some pixels of the images, see `conv/implicit_gemm_input_grad.cu`.
    """

    problem: ConvProblem
    target: Target
    file: str
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
            self.file,
            self.name,
            lengths if pixels else (*lengths, splits),
            (problem.dtype,),
            blocks=(tiles, problem.groups, self.phases) if pixels else (tiles, splits, problem.groups),
            threads=tile.threads,
            shared=tile.shared(itemsize),
            definitions={
                **{**problem.window_macros(), **tile.definitions(), "SPLIT": int(splits > 1), "WIDE_C": wide},
                "SHARED_BYTES": tile.shared(itemsize),
            },
        )
        size = 1, problem.outputs[1], problem.group_channels * problem.taps, splits
        return with_split_k(multiply, problem.dtype, *size, self.target.by_member)


def forward(problem: ConvProblem, target: Target) -> ImplicitGemm:
    """Rows are filters, columns the pixels of all outputs, K the channels and taps."""
    lengths = problem.group_filters, problem.pixels, problem.group_channels * problem.taps
    area = math.prod(problem.outputs[2:])
    return ImplicitGemm(problem, target, "conv/implicit_gemm.cu", "conv2d", lengths, area, Gathers.PIXELS)


def input_grad(problem: ConvProblem, target: Target) -> ImplicitGemm:
    """Rows are channels, columns the images' pixels of one phase, K the filters and the phase's taps."""
    (count, _, *size), (sh, sw) = problem.images, problem.stride
    pixels = count * -(-size[0] // sh) * -(-size[1] // sw)
    lengths = problem.group_channels, pixels, -(-problem.group_filters * problem.taps // (sh * sw))
    contiguous = math.prod(size) if problem.unit_stride else 1  # the pixels of one phase are a stride apart
    file, name = "conv/implicit_gemm_input_grad.cu", "conv2d_input_grad"
    return ImplicitGemm(problem, target, file, name, lengths, contiguous, Gathers.PIXELS, sh * sw)


def weight_grad(problem: ConvProblem, target: Target) -> ImplicitGemm:
    """Rows are filters, columns the channels and taps, K the pixels of all outputs."""
    elements = problem.group_channels * problem.taps
    lengths = problem.group_filters, elements, problem.pixels
    file, name = "conv/implicit_gemm_weight_grad.cu", "conv2d_weight_grad"
    return ImplicitGemm(problem, target, file, name, lengths, elements, Gathers.ELEMENTS)
