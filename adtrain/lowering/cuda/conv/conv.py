"""The CUDA kernels for convolutions (`kernels/cuda/conv`): implicit GEMM (`implicit_gemm.cuh`), direct convolution for
few channels (`direct.cuh`), and on Hopper shifted implicit GEMM (`shifted.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel
from adtrain.core.precision import FULL
from adtrain.core.target import Target
from adtrain.lowering.cuda.conv.direct import Few, FewConvolution, FewWeightGrad
from adtrain.lowering.cuda.conv.fp16x2_weight_grad import HalvesWeightGrad
from adtrain.lowering.cuda.conv.padded_index import Positions
from adtrain.lowering.cuda.conv.shifted import PlaneConvolution
from adtrain.lowering.cuda.conv.shifted_weight_grad import PlaneWeightGrad
from adtrain.lowering.cuda.gemm.cost_model import FMA_LANES, TILED, Gathers, ranked
from adtrain.lowering.cuda.gemm.split_k import split_k_sum
from adtrain.lowering.cuda.gemm.tiles import Tile

MOST = 6
"""Candidates for one convolution that gather matrices."""
PLAIN_SPEED, ROUNDED_SPEED = 0.6, 1.1
"""Multiply-adds of these on a multiprocessor at best, as a share of the float32 units', measured; of rounded operands,
on the matrix units."""
STEP, FIRST_K = 16, 32
"""The fewest rows and columns that are multiplied; the length of sums that take as long as all else of a tile."""
LARGEST, GATHERED = 128, 1.6
"""Rows and columns of a tile, at most; elements that a multiprocessor gathers in a cycle, measured."""
HOPELESS = 2.0
"""A kernel that should take so many times their time is no candidate."""


class Engine(Protocol):
    """Another way to compute a convolution: a kernel, and an estimate of its time."""

    @property
    def cycles(self) -> float: ...

    def kernel(self) -> LegacyKernel: ...


class Convolution(NamedTuple):
    """The shapes of image, weight and output, the window, and the elements' type and what they are rounded to."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    window: Any
    dtype: np.dtype
    precision: str

    def numbers(self) -> tuple[int, ...]:
        """CONV_NUMBERS of `kernels/cuda/conv/implicit_gemm.cuh`."""
        return (*self.x, *self.y[1:], self.window.groups)

    def definitions(self) -> dict[str, int]:
        values = (*self.w[2:], *self.window.stride, *self.window.padding, *self.window.dilation)
        return dict(zip(("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW"), values, strict=True))

    def dense(self) -> bool:
        """Whether neighbouring outputs have neighbouring windows."""
        return tuple(self.window.stride) == (1, 1)

    def positions(self) -> Positions | None:
        """It as a convolution of positions, where it can be one."""
        rows, columns = self.w[2:]
        found = Positions(self.x, self.y, (rows, columns), self.window.padding, self.window.dilation, self.precision)
        return found if self.dtype.itemsize == 4 and self.window.groups == 1 and self.dense() else None

    def few(self) -> Few | None:
        """It as a convolution of few channels, where it is of float32."""
        rows, columns = self.w[2:]
        stride, padding, dilation, groups = self.window
        found = Few(self.x, self.y, (rows, columns), stride, padding, dilation, groups, self.precision)
        return found if self.dtype.itemsize == 4 else None


class Product(NamedTuple):
    """The matrix product that a kernel computes for each group.

    Attributes:
        lengths: M, N, K.
        neighbours: of the product's columns, how many are neighbours in memory.
        gathers: what its columns are.
        phases: how many such products there are, see `conv/implicit_gemm_input_grad.cu`.
    """

    lengths: tuple[int, int, int]
    neighbours: int
    gathers: Gathers
    phases: int = 1

    def tiles(self, conv: Convolution) -> Sequence[tuple[Tile, int]]:
        """The tiles for it and the parts of K, the rule's choice first."""
        batch = conv.window.groups * self.phases
        target = Target(CHIP.capability, CHIP.multiprocessors, CHIP.shared)
        found = ranked(conv.dtype.itemsize, batch, *self.lengths, target, conv.precision, self.gathers)
        return [(tile, parts) for tile, parts in found[:MOST] if isinstance(tile, Tile)]

    def cycles(self, conv: Convolution) -> float:
        """An estimate of the time that the best tiles take, which are of whole steps of rows, columns and k."""
        *sides, k = self.lengths
        m, n = (-(-length // STEP) * STEP for length in sides)
        products = m * n * (k + FIRST_K) / (FMA_LANES * (PLAIN_SPEED if conv.precision == FULL else ROUNDED_SPEED))
        gathered = n * -(-m // LARGEST) * k / GATHERED
        start = TILED.start
        if self.gathers is Gathers.ELEMENTS:
            gathered += m * -(-n // LARGEST) * k / GATHERED
            start += TILED.second_pass  # k is long, and cut into parts
        return start + conv.window.groups * self.phases * max(products, gathered) / CHIP.multiprocessors


def _kernel(file: str, name: str, conv: Convolution, product: Product, tile: Tile, parts: int) -> LegacyKernel:
    m, n, _ = product.lengths
    count, groups = -(-m // tile.m) * -(-n // tile.n), conv.window.groups
    wide = tile.store_width(conv.dtype.itemsize, product.neighbours)
    definitions = {**conv.definitions(), **tile.definitions(), "SPLIT": int(parts > 1), "WIDE_C": wide}
    pixels = product.gathers is Gathers.PIXELS
    numbers = conv.numbers() if pixels else (*conv.numbers(), parts)
    whole = LegacyKernel(
        file,
        name,
        lambda *_, **__: numbers,
        blocks=lambda *_, **__: (count, groups, product.phases) if pixels else (count, parts, groups),
        threads=lambda *_, **__: tile.threads,
        shared=lambda *_, **__: tile.shared(conv.dtype.itemsize),
        definitions=lambda *_, **__: definitions,
    )
    if parts == 1:
        return whole
    size = math.prod(conv.w)
    add = split_k_sum(conv.dtype, 1, conv.w[0], size // conv.w[0], parts)
    return replace(
        whole,
        scratch=lambda *_, **__: parts * size * conv.dtype.itemsize,
        then=LegacyKernel(
            add.file,
            add.name,
            lambda *_, **__: add.numbers,
            blocks=lambda *_, **__: add.blocks,
            threads=lambda *_, **__: add.threads,
            definitions=lambda *_, **__: add.definitions,
        ),
    )


def _candidates(
    gathered: Sequence[LegacyKernel], product: Product, others: Sequence[Engine], conv: Convolution
) -> Sequence[LegacyKernel]:
    """Kernels that gather matrices, and others at their places by the estimate of the time."""
    cycles = product.cycles(conv)
    possible = sorted((e for e in others if e.cycles <= HOPELESS * cycles), key=lambda e: e.cycles)
    faster = [e.kernel() for e in possible if e.cycles < cycles]
    return [*faster, *gathered, *(e.kernel() for e in possible[len(faster) :])]


def convolution(x: Any, w: Any, window: Any, precision: str) -> Convolution:
    """Of images and weights."""
    rows, columns = (window.output_length(i, x.shape[i + 2], w.shape[i + 2]) for i in (0, 1))
    return Convolution(x.shape, w.shape, (x.shape[0], w.shape[0], rows, columns), window, x.dtype, precision)


def forward(x: Any, w: Any, window: Any, precision: str = FULL) -> Sequence[LegacyKernel]:
    """The candidates for a convolution."""
    conv = convolution(x, w, window, precision)
    area = math.prod(conv.y[2:])
    product = Product((w.shape[0] // window.groups, x.shape[0] * area, math.prod(w.shape[1:])), area, Gathers.PIXELS)
    gathered = [_kernel("conv/implicit_gemm.cu", "conv2d", conv, product, *tile) for tile in product.tiles(conv)]
    others: list[Engine] = []
    if positions := conv.positions():
        others += by_positions(positions, False)
    if (few := conv.few()) and FewConvolution(few, False).suits():
        others.append(FewConvolution(few, False))
    return _candidates(gathered, product, others, conv)


def by_positions(positions: Positions, turned: bool) -> list[PlaneConvolution]:
    """In pieces, and in halves."""
    found = [PlaneConvolution(positions, turned, halves).fitted() for halves in (False, True)]
    return [planes for planes in found if planes is not None]


def weight_grads(positions: Positions) -> list[PlaneWeightGrad | HalvesWeightGrad]:
    """In pieces, and in halves."""
    pieces, halves = PlaneWeightGrad(positions).fitted(), HalvesWeightGrad(positions)
    return [*([pieces] if pieces else []), *([halves] if halves.suits() else [])]


def input_grad(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> Sequence[LegacyKernel]:
    """The candidates for the gradient by the images: a product for each phase of pixels, a stride apart."""
    groups, (sh, sw) = window.groups, window.stride
    conv = Convolution((g.shape[0], w.shape[1] * groups, *size), w.shape, g.shape, window, g.dtype, precision)
    pixels = g.shape[0] * -(-size[0] // sh) * -(-size[1] // sw)
    lengths = w.shape[1], pixels, -(-w.shape[0] // groups * w.shape[2] * w.shape[3] // (sh * sw))
    # Neighbouring pixels of one of several phases are not neighbours in the image.
    product = Product(lengths, math.prod(size) if sh * sw == 1 else 1, Gathers.PIXELS, sh * sw)
    tiles = product.tiles(conv)
    gathered = [
        _kernel("conv/implicit_gemm_input_grad.cu", "conv2d_input_grad", conv, product, *tile) for tile in tiles
    ]
    others: list[Engine] = []
    if positions := conv.positions():
        others += by_positions(positions.turned(), True)
    if conv.dense() and (few := conv.few()) and FewConvolution(few.turned(), True).suits():
        others.append(FewConvolution(few.turned(), True))
    return _candidates(gathered, product, others, conv)


def weight_grad(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> Sequence[LegacyKernel]:
    """The candidates for the gradient by the weights; its long K is cut into parts."""
    groups = window.groups
    conv = Convolution(x.shape, (g.shape[1], x.shape[1] // groups, *size), g.shape, window, x.dtype, precision)
    elements = math.prod(conv.w[1:])
    lengths = conv.w[0] // groups, elements, math.prod(g.shape) // max(g.shape[1], 1)
    product = Product(lengths, elements, Gathers.ELEMENTS)
    tiles = product.tiles(conv)
    gathered = [
        _kernel("conv/implicit_gemm_weight_grad.cu", "conv2d_weight_grad", conv, product, *tile) for tile in tiles
    ]
    others: list[Engine] = []
    if positions := conv.positions():
        others += weight_grads(positions)
    if (few := conv.few()) and FewWeightGrad(few).suits():
        others.append(FewWeightGrad(few))
    return _candidates(gathered, product, others, conv)


def weight_grad_sum(
    x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL
) -> Sequence[LegacyKernel]:
    """The kernel for the gradients by weights and bias, where the best one by the weights can do that, too."""
    conv = Convolution(x.shape, (g.shape[1], x.shape[1] // window.groups, *size), g.shape, window, x.dtype, precision)
    alone, few = weight_grad(x, g, window, size, precision), conv.few()
    both = FewWeightGrad(few, bias=True).kernel() if few else None
    return [both] if both and alone[0].file == both.file else []
