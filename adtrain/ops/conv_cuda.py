"""The CUDA kernels for convolutions: products with matrices gathered from the images, see `kernels/cuda/conv.cuh`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel
from adtrain.core.precision import FULL
from adtrain.ops.tiles_cuda import Tile, chosen


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


def _in_full(*args: Any, precision: str = FULL, **params: Any) -> bool:
    return precision == FULL


class Product(NamedTuple):
    """The matrix product that a kernel computes for each group, and the launch that follows."""

    lengths: tuple[int, int, int]  # M, N, K
    choice: tuple[Tile, int]
    phases: int = 1

    def tiles(self) -> int:
        tile, _ = self.choice
        return -(-self.lengths[0] // tile.m) * -(-self.lengths[1] // tile.n)


def _forward(x: Any, w: Any, window: Any, precision: str = FULL) -> Convolution:
    rows, columns = (window.output_length(i, x.shape[i + 2], w.shape[i + 2]) for i in (0, 1))
    return Convolution(x.shape, w.shape, (x.shape[0], w.shape[0], rows, columns), window, x.dtype)


def _input_grad(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> Convolution:
    return Convolution((g.shape[0], w.shape[1] * window.groups, *size), w.shape, g.shape, window, g.dtype)


def _weight_grad(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> Convolution:
    return Convolution(x.shape, (g.shape[1], x.shape[1] // window.groups, *size), g.shape, window, x.dtype)


def _forward_product(conv: Convolution) -> Product:
    groups = conv.window.groups
    lengths = conv.w[0] // groups, conv.x[0] * conv.y[2] * conv.y[3], math.prod(conv.w[1:])
    return Product(lengths, chosen(conv.dtype, groups, *lengths, windows=True, cut=False))


def _input_grad_product(conv: Convolution) -> Product:
    """Of a phase: pixels that are a stride apart."""
    groups, (sh, sw) = conv.window.groups, conv.window.stride
    pixels = conv.x[0] * -(-conv.x[2] // sh) * -(-conv.x[3] // sw)
    lengths = conv.w[1], pixels, -(-conv.w[0] // groups * conv.w[2] * conv.w[3] // (sh * sw))
    return Product(lengths, chosen(conv.dtype, groups * sh * sw, *lengths, windows=True, cut=False), sh * sw)


def _weight_grad_product(conv: Convolution) -> Product:
    groups = conv.window.groups
    lengths = conv.w[0] // groups, math.prod(conv.w[1:]), math.prod(conv.y) // max(conv.y[1], 1)
    return Product(lengths, chosen(conv.dtype, groups, *lengths))


def _gathered(name: str, read: Callable[..., Convolution], product: Callable[[Convolution], Product]) -> CudaKernel:
    def wide(conv: Convolution, tile: Tile) -> int:
        image = conv.y if name == "conv2d" else conv.x
        # Neighbouring pixels of one of several phases are not neighbours in the image.
        return tile.columns_at_once(conv.dtype.itemsize, math.prod(image[2:]) if product(conv).phases == 1 else 1)

    def definitions(*args: Any, **params: Any) -> dict[str, int]:
        conv = read(*args, **params)
        tile, _ = product(conv).choice
        return {**conv.definitions(), **tile.definitions(), "SPLIT": 0, "WIDE_C": wide(conv, tile)}

    def blocks(*args: Any, **params: Any) -> tuple[int, int, int]:
        conv = read(*args, **params)
        launch = product(conv)
        return launch.tiles(), conv.window.groups, launch.phases

    return CudaKernel(
        "conv.cu" if name == "conv2d" else "conv_input_grad.cu",
        name,
        lambda *args, **params: read(*args, **params).numbers(),
        blocks=blocks,
        threads=lambda *args, **params: product(read(*args, **params)).choice[0].threads,
        shared=lambda a, *args, **params: product(read(a, *args, **params)).choice[0].shared(a.dtype.itemsize),
        definitions=definitions,
        applies=_in_full,
    )


FORWARD = _gathered("conv2d", _forward, _forward_product)
INPUT_GRAD = _gathered("conv2d_input_grad", _input_grad, _input_grad_product)


def _parts(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> int:
    return _weight_grad_product(_weight_grad(x, g, window, size)).choice[1]


def _weight_grad_tile(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> Tile:
    return _weight_grad_product(_weight_grad(x, g, window, size)).choice[0]


def _weight_grad_blocks(*args: Any, **params: Any) -> tuple[int, int, int]:
    conv = _weight_grad(*args, **params)
    product = _weight_grad_product(conv)
    return product.tiles(), product.choice[1], conv.window.groups


def _weight_grad_definitions(*args: Any, **params: Any) -> dict[str, int]:
    conv = _weight_grad(*args, **params)
    product = _weight_grad_product(conv)
    tile, parts = product.choice
    wide = tile.columns_at_once(conv.dtype.itemsize, product.lengths[1])
    return {**conv.definitions(), **tile.definitions(), "SPLIT": int(parts > 1), "WIDE_C": wide}


def _weight_size(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> int:
    return math.prod(_weight_grad(x, g, window, size).w)


def _sum_numbers(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str = FULL) -> tuple[int, ...]:
    conv = _weight_grad(x, g, window, size)
    return math.prod(conv.w), conv.w[0], math.prod(conv.w[1:]), _parts(x, g, window, size)


WEIGHT_GRAD = CudaKernel(
    "conv_weight_grad.cu",
    "conv2d_weight_grad",
    lambda *args, **params: (*_weight_grad(*args, **params).numbers(), _parts(*args, **params)),
    blocks=_weight_grad_blocks,
    threads=lambda *args, **params: _weight_grad_tile(*args, **params).threads,
    shared=lambda x, *args, **params: _weight_grad_tile(x, *args, **params).shared(x.dtype.itemsize),
    definitions=_weight_grad_definitions,
    applies=lambda *args, **params: _in_full(**params) and _parts(*args, **params) == 1,
)
SPLIT_WEIGHT_GRAD = CudaKernel(
    WEIGHT_GRAD.file,
    WEIGHT_GRAD.name,
    WEIGHT_GRAD.numbers,
    blocks=WEIGHT_GRAD.blocks,
    threads=WEIGHT_GRAD.threads,
    shared=WEIGHT_GRAD.shared,
    definitions=WEIGHT_GRAD.definitions,
    scratch=lambda x, *args, **params: _parts(x, *args, **params) * _weight_size(x, *args, **params) * x.dtype.itemsize,
    applies=lambda *args, **params: _in_full(*args, **params) and _parts(*args, **params) > 1,
    then=CudaKernel("sum_splits.cu", "sum_splits", _sum_numbers, elements=_weight_size),
)
