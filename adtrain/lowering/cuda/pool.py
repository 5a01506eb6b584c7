"""The rules for pooling (`kernels/cuda/pool/pool.cu`), of images (N, C, H, W) and of images that are channels last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.primitive import BFLOAT16, CHANNELS_LAST, PRIMITIVES
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.problem import window_macros
from adtrain.lowering.shapes import element_types

FILE = "pool/pool.cu"
MAX_CELL, MAX_CELL_LAST = 16, 9
"""Maximum elements of a window, or of a stride, for which a thread computes several pixels (with channels last)."""
VECTOR_BYTES = 16
"""The bytes that a thread writes at once."""


class _Images(NamedTuple):
    """Images as planes of pixels. A pixel has one element, or all channels if they are last."""

    planes: int
    height: int
    width: int
    channels: int

    @property
    def size(self) -> int:
        return math.prod(self)


def _images(shape: Sequence[int], last: bool) -> _Images:
    return _Images(*shape) if last else _Images(shape[0] * shape[1], shape[2], shape[3], 1)


def _max_pooled(x: Any, windows: Any, last: bool) -> Sequence[ArrayType]:
    """The types of the pooled image and of the positions of maxima."""
    primitive = PRIMITIVES["max_pool2d" + (CHANNELS_LAST if last else "")]
    return primitive.output_types([ArrayType(x.shape, element_types(x.dtype)[0])], {"windows": windows})


def _reads_windows(
    name: str, x: Sequence[int], y: Sequence[int], windows: Any, dtype: np.dtype, last: bool, as_bytes: bool = False
) -> list[CudaKernel]:
    """A kernel with a thread for a vector of channels, or for one or two neighbouring outputs.

    Args:
        x, y: shapes of the image and the pooled one.
        last: whether channels are last.
        as_bytes: whether positions of maxima are bytes.
    """
    images, pooled = _images(x, last), _images(y, last)
    at_once = 1 if last or math.prod(windows.kernel) > MAX_CELL else math.gcd(pooled.width, 2)
    macros = {**_macros(windows, as_bytes), "AT_ONCE": at_once}
    return _kernel(name, images, pooled, dtype, pooled.size // at_once, macros, last)


def _writes_cells(
    name: str, x: Sequence[int], y: Sequence[int], windows: Any, dtype: np.dtype, last: bool, as_bytes: bool = False
) -> list[CudaKernel]:
    """A kernel with a thread for each cell of the image."""
    images, pooled = _images(x, last), _images(y, last)
    small = math.prod(windows.stride) <= (MAX_CELL_LAST if last else MAX_CELL)
    rows, columns = windows.stride if small else (1, 1)
    if small and not last:
        wide = VECTOR_BYTES // element_types(dtype)[0].itemsize
        columns = columns if wide % columns else wide
    return _kernel(name, images, pooled, dtype, -(-images.size // (rows * columns)), _macros(windows, as_bytes), last)


def _kernel(
    name: str,
    images: _Images,
    pooled: _Images,
    dtype: np.dtype,
    elements: int,
    macros: Mapping[str, int],
    last: bool,
) -> list[CudaKernel]:
    lengths = (*images[:3], *pooled[1:3])  # POOL_NUMBERS
    types = element_types(dtype)
    if last:
        lanes = math.gcd(images.channels, VECTOR_BYTES // dtype.itemsize)
        macros = {**macros, "CHANNELS": images.channels, "LANES": lanes}
        elements = -(-elements // lanes)
    return [CudaKernel((CudaLaunch(FILE, name, lengths, types, elements=elements, definitions=macros),))]


def max_pool2d(target: Target, x: Any, windows: Any, last: bool = False) -> list[CudaKernel]:
    y, where = _max_pooled(x, windows, last)
    return _reads_windows("max_pool2d", x.shape, y.shape, windows, x.dtype, last, where.dtype == np.uint8)


def max_pool2d_pick(target: Target, x: Any, where: Any, windows: Any, last: bool = False) -> list[CudaKernel]:
    return _reads_windows("max_pool2d_pick", x.shape, where.shape, windows, x.dtype, last, where.dtype == np.uint8)


def max_pool2d_put(
    target: Target, ct: Any, where: Any, windows: Any, shape: Sequence[int], last: bool = False
) -> list[CudaKernel]:
    return _writes_cells("max_pool2d_put", shape, ct.shape, windows, ct.dtype, last, where.dtype == np.uint8)


def avg_pool2d(target: Target, x: Any, windows: Any, last: bool = False) -> list[CudaKernel]:
    y, _ = _max_pooled(x, windows, last)
    return _reads_windows("avg_pool2d", x.shape, y.shape, windows, x.dtype, last)


def avg_pool2d_put(target: Target, ct: Any, windows: Any, shape: Sequence[int], last: bool = False) -> list[CudaKernel]:
    return _writes_cells("avg_pool2d_put", shape, ct.shape, windows, ct.dtype, last)


def _macros(windows: Any, as_bytes: bool) -> dict[str, int]:
    macros = window_macros(windows.kernel, windows.stride, windows.padding)
    return {**macros, "BYTE_POSITIONS": 1} if as_bytes else macros


_RULES: Sequence[Callable[..., list[CudaKernel]]] = (
    max_pool2d,
    max_pool2d_pick,
    max_pool2d_put,
    avg_pool2d,
    avg_pool2d_put,
)
for _rule in _RULES:
    for _arrays in ("", BFLOAT16):
        register(_rule.__name__ + _arrays, "cuda", _rule)
        register(_rule.__name__ + CHANNELS_LAST + _arrays, "cuda", partial(_rule, last=True))
