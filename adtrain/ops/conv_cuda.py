"""The CUDA kernels for convolutions: products with matrices gathered from the images (`kernels/cuda/conv.cuh`), of few
channels sums in registers (`few.cuh`), and on Hopper products of the images' positions (`planes.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from adtrain.core.array import ArrayType
from adtrain.core.chip import CHIP, Chip
from adtrain.core.kernel import CudaKernel
from adtrain.core.precision import FULL
from adtrain.ops.choice_cuda import LANES, SECOND_PASS, START, Gathers, ranked
from adtrain.ops.few_cuda import Few, FewConvolution, FewWeightGrad
from adtrain.ops.halves_weight_grad_cuda import HalvesWeightGrad
from adtrain.ops.planes_cuda import PlaneConvolution
from adtrain.ops.planes_weight_grad_cuda import PlaneWeightGrad
from adtrain.ops.pooled_cuda import PooledInputGrad
from adtrain.ops.positions import Positions
from adtrain.ops.splits_cuda import sum_splits
from adtrain.ops.tiles_cuda import Tile

MOST = 6
"""Candidates for one convolution that gather matrices."""
PLAIN_SPEED, ROUNDED_SPEED = 0.6, 1.1
"""Multiply-adds of these on a multiprocessor at best, as a share of the float32 units', measured; of rounded operands,
on the matrix units."""
STEP, FIRST_K = 16, 32
"""The fewest rows and columns that are multiplied; the length of sums that take as long as all else of a tile."""
LARGEST, GATHERED = 128, 1.6
"""Rows and columns of a tile, at most; elements that a multiprocessor gathers in a cycle, measured."""
WINDOWS = (2, 2), (2, 2), (0, 0)
"""Window, stride and padding of a max pooling that a convolution can hand its elements to."""
POOLING, POOLED = 4000, 400
"""Cycles of the launch of such a pooling alone; elements that it reads in a cycle."""
HOPELESS = 2.0
"""A kernel that should take so many times their time is no candidate."""


class Engine(Protocol):
    """Another way to compute a convolution: a kernel, and an estimate of its time."""

    @property
    def cycles(self) -> float: ...

    def kernel(self) -> CudaKernel: ...


AnEngine = TypeVar("AnEngine", bound=Engine)


class Convolution(NamedTuple):
    """The shapes of image, weight and output, and the window."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    window: Any
    dtype: np.dtype

    def numbers(self) -> tuple[int, ...]:
        """CONV_NUMBERS of `kernels/cuda/conv.cuh`."""
        return (*self.x, *self.y[1:], self.window.groups)

    def definitions(self) -> dict[str, int]:
        values = (*self.w[2:], *self.window.stride, *self.window.padding, *self.window.dilation)
        return dict(zip(("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW"), values, strict=True))

    def single(self) -> bool:
        """Whether it is of float32 numbers."""
        return self.dtype.itemsize == 4

    def dense(self) -> bool:
        """Whether neighbouring outputs have neighbouring windows."""
        return tuple(self.window.stride) == (1, 1)

    def positions(self, precision: str) -> Positions | None:
        """It as a convolution of positions, where it can be one."""
        rows, columns = self.w[2:]
        found = Positions(self.x, self.y, (rows, columns), self.window.padding, self.window.dilation, precision)
        return found if self.single() and self.window.groups == 1 and self.dense() else None

    def few(self, precision: str) -> Few:
        """It as a convolution of few channels."""
        rows, columns = self.w[2:]
        stride, padding, dilation, groups = self.window
        return Few(self.x, self.y, (rows, columns), stride, padding, dilation, groups, precision)


class Product(NamedTuple):
    """The matrix product that a kernel computes for each group.

    Attributes:
        lengths: M, N, K.
        neighbours: of the product's columns, how many are neighbours in memory.
        gathers: what its columns are.
        phases: how many such products there are, see `conv_input_grad.cu`.
    """

    lengths: tuple[int, int, int]
    neighbours: int
    gathers: Gathers
    phases: int = 1

    def tiles(self, conv: Convolution, precision: str) -> Sequence[tuple[Tile, int]]:
        """The tiles for it and the parts of K, the rule's choice first."""
        batch = conv.window.groups * self.phases
        chip = Chip(CHIP.multiprocessors, CHIP.capability)
        found = ranked(conv.dtype.itemsize, batch, *self.lengths, chip, precision, self.gathers)
        return [(tile, parts) for tile, parts in found[:MOST] if isinstance(tile, Tile)]

    def cycles(self, groups: int, precision: str) -> float:
        """An estimate of the time that the best tiles take, which are of whole steps of rows, columns and k."""
        *sides, k = self.lengths
        m, n = (-(-length // STEP) * STEP for length in sides)
        products = m * n * (k + FIRST_K) / (LANES * (PLAIN_SPEED if precision == FULL else ROUNDED_SPEED))
        gathered = n * -(-m // LARGEST) * k / GATHERED
        start = START
        if self.gathers is Gathers.ELEMENTS:
            gathered += m * -(-n // LARGEST) * k / GATHERED
            start += SECOND_PASS  # k is long, and cut into parts
        return start + groups * self.phases * max(products, gathered) / CHIP.multiprocessors


def _kernel(file: str, name: str, conv: Convolution, product: Product, tile: Tile, parts: int) -> CudaKernel:
    m, n, _ = product.lengths
    count, groups = -(-m // tile.m) * -(-n // tile.n), conv.window.groups
    wide = tile.columns_at_once(conv.dtype.itemsize, product.neighbours)
    definitions = {**conv.definitions(), **tile.definitions(), "SPLIT": int(parts > 1), "WIDE_C": wide}
    pixels = product.gathers is Gathers.PIXELS
    numbers = conv.numbers() if pixels else (*conv.numbers(), parts)
    whole = CudaKernel(
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
    return replace(
        whole,
        scratch=lambda *_, **__: parts * size * conv.dtype.itemsize,
        then=sum_splits(size, conv.w[0], size // conv.w[0], parts),
    )


def _candidates(
    gathered: Sequence[CudaKernel], product: Product, others: Sequence[Engine], conv: Convolution, precision: str
) -> Sequence[CudaKernel]:
    """Kernels that gather matrices, and others at their places by the estimate of the time."""
    cycles = product.cycles(conv.window.groups, precision)
    possible = sorted((e for e in others if e.cycles <= HOPELESS * cycles), key=lambda e: e.cycles)
    faster = [e.kernel() for e in possible if e.cycles < cycles]
    return [*faster, *gathered, *(e.kernel() for e in possible[len(faster) :])]


def _forward(x: Any, w: Any, window: Any) -> Convolution:
    rows, columns = (window.output_length(i, x.shape[i + 2], w.shape[i + 2]) for i in (0, 1))
    return Convolution(x.shape, w.shape, (x.shape[0], w.shape[0], rows, columns), window, x.dtype)


def forward(x: Any, w: Any, window: Any, precision: str = "full") -> Sequence[CudaKernel]:
    """The candidates for a convolution."""
    conv = _forward(x, w, window)
    area = math.prod(conv.y[2:])
    product = Product((w.shape[0] // window.groups, x.shape[0] * area, math.prod(w.shape[1:])), area, Gathers.PIXELS)
    gathered = [_kernel("conv.cu", "conv2d", conv, product, *tile) for tile in product.tiles(conv, precision)]
    others: list[Engine] = []
    if positions := conv.positions(precision):
        others += _by_positions(positions, False)
    if conv.single() and (few := FewConvolution(conv.few(precision), False)).suits():
        others.append(few)
    return _candidates(gathered, product, others, conv, precision)


def forward_pooled(x: Any, w: Any, window: Any, precision: str, windows: Any) -> Sequence[CudaKernel]:
    """The kernel for a convolution with a max pooling of what its elements become, where that should be faster than one
    after the other: of windows of 2 x 2, where the convolution is computed by positions anyway."""
    conv, alone = _forward(x, w, window), forward(x, w, window, precision)
    positions = conv.positions(precision)
    if positions is None or windows != WINDOWS:
        return []
    pooled = PlaneConvolution(positions, False, pooled=True).fitted()
    faster = _faster(alone, _by_positions(positions, False), pooled, POOLING + math.prod(conv.y) / POOLED)
    return [faster.kernel()] if faster else []


def input_grad_pooled(
    g: Any, where: Any, w: Any, window: Any, windows: Any, shape: Any, size: tuple[int, int], precision: str
) -> Sequence[CudaKernel]:
    """The kernel for the gradient by the images behind a max pooling of windows of 2 x 2, where that should be faster
    than the one that is computed by positions otherwise."""
    conv = Convolution((g.shape[0], w.shape[1], *size), w.shape, shape, window, g.dtype)
    positions = conv.positions(precision)
    if positions is None or windows != WINDOWS:
        return []
    turned = positions.turned()
    alone, pooled = input_grad(ArrayType(shape, g.dtype), w, window, size, precision), PooledInputGrad(turned)
    faster = _faster(alone, _by_positions(turned, True), pooled if pooled.suits() else None)
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
) -> Sequence[CudaKernel]:
    """The same for the gradient by the weights, or by weights and bias."""
    conv = Convolution(x.shape, (shape[1], x.shape[1], *size), shape, window, x.dtype)
    positions = conv.positions(precision)
    whole = precision == FULL or not bias  # a bias' gradient is of what is not rounded
    if positions is None or windows != WINDOWS or not whole:
        return []
    alone = weight_grad(x, ArrayType(shape, g.dtype), window, size, precision)
    faster = _faster(alone, _weight_grads(positions), PlaneWeightGrad(positions, pooled=True).fitted())
    return [replace(faster, bias=bias).kernel()] if faster else []


def _faster(
    alone: Sequence[CudaKernel], engines: Sequence[Engine], pooled: AnEngine | None, apart: float = 0
) -> AnEngine | None:
    """What has to do with a pooling, if it should be no slower than the one of ``engines`` that is taken ``alone``, and
    the cycles of what that leaves ``apart``."""
    taken = (engine for engine in engines if alone and engine.kernel().file == alone[0].file)
    return pooled if pooled and pooled.cycles <= next((engine.cycles + apart for engine in taken), -1) else None


def by_positions(kernel: CudaKernel) -> bool:
    """Whether it is one of those on Hopper's matrix units."""
    return any(name in kernel.file for name in ("planes", "halves", "pooled"))


def _by_positions(positions: Positions, turned: bool) -> list[PlaneConvolution]:
    """In pieces, and in halves."""
    found = [PlaneConvolution(positions, turned, halves).fitted() for halves in (False, True)]
    return [planes for planes in found if planes is not None]


def _weight_grads(positions: Positions) -> list[PlaneWeightGrad | HalvesWeightGrad]:
    """In pieces, and in halves."""
    pieces, halves = PlaneWeightGrad(positions).fitted(), HalvesWeightGrad(positions)
    return [*([pieces] if pieces else []), *([halves] if halves.suits() else [])]


def input_grad(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str = "full") -> Sequence[CudaKernel]:
    """The candidates for the gradient by the images: a product for each phase of pixels, a stride apart."""
    groups, (sh, sw) = window.groups, window.stride
    conv = Convolution((g.shape[0], w.shape[1] * groups, *size), w.shape, g.shape, window, g.dtype)
    pixels = g.shape[0] * -(-size[0] // sh) * -(-size[1] // sw)
    lengths = w.shape[1], pixels, -(-w.shape[0] // groups * w.shape[2] * w.shape[3] // (sh * sw))
    # Neighbouring pixels of one of several phases are not neighbours in the image.
    product = Product(lengths, math.prod(size) if sh * sw == 1 else 1, Gathers.PIXELS, sh * sw)
    tiles = product.tiles(conv, precision)
    gathered = [_kernel("conv_input_grad.cu", "conv2d_input_grad", conv, product, *tile) for tile in tiles]
    others: list[Engine] = []
    if positions := conv.positions(precision):
        others += _by_positions(positions.turned(), True)
    if conv.single() and conv.dense() and (few := FewConvolution(conv.few(precision).turned(), True)).suits():
        others.append(few)
    return _candidates(gathered, product, others, conv, precision)


def weight_grad(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = "full") -> Sequence[CudaKernel]:
    """The candidates for the gradient by the weights; its long K is cut into parts."""
    groups = window.groups
    conv = Convolution(x.shape, (g.shape[1], x.shape[1] // groups, *size), g.shape, window, x.dtype)
    elements = math.prod(conv.w[1:])
    lengths = conv.w[0] // groups, elements, math.prod(g.shape) // max(g.shape[1], 1)
    product = Product(lengths, elements, Gathers.ELEMENTS)
    tiles = product.tiles(conv, precision)
    gathered = [_kernel("conv_weight_grad.cu", "conv2d_weight_grad", conv, product, *tile) for tile in tiles]
    others: list[Engine] = []
    if positions := conv.positions(precision):
        others += _weight_grads(positions)
    if conv.single() and (few := FewWeightGrad(conv.few(precision))).suits():
        others.append(few)
    return _candidates(gathered, product, others, conv, precision)


def weight_grad_sum(
    x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = "full"
) -> Sequence[CudaKernel]:
    """The kernel for the gradients by weights and bias, where the best one by the weights can do that, too."""
    conv = Convolution(x.shape, (g.shape[1], x.shape[1] // window.groups, *size), g.shape, window, x.dtype)
    alone = weight_grad(x, g, window, size, precision)
    both = FewWeightGrad(conv.few(precision), bias=True).kernel()
    return [both] if alone[0].file == both.file else []
