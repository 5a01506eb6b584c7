"""The rules for pooling (`kernels/cuda/pool/pool.cu`), of images (N, C, H, W) and of images that are channels last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch, Target, register
from adtrain.core.primitive import BFLOAT16, CHANNELS_LAST, PRIMITIVES
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


def _rule(
    name: str, last: bool, target: Target, first: Any, *others: Any, windows: Any, shape: Sequence[int] = ()
) -> list[CudaKernel]:
    """The rule of pooling, or of its gradient.

    A thread reads the windows of a vector of channels, or of one or two neighbouring outputs; or it writes a cell of
    the image.

    Args:
        last: whether channels are last.
        first, others: an image; a gradient by the pooled image if the name ends in "put"; then positions of maxima for
            "pick" and for the "put" of a maximum.
        shape: of the image for "put".
    """
    puts = name.endswith("put")
    positions: Any = others[0] if others else None
    pooled_type: Any = first if puts else positions
    if pooled_type is None:
        primitive = PRIMITIVES["max_pool2d" + (CHANNELS_LAST if last else "")]
        image = ArrayType(first.shape, element_types(first.dtype)[0])
        pooled_type, positions = primitive.output_types([image], {"windows": windows})
    images, pooled = _images(shape if puts else first.shape, last), _images(pooled_type.shape, last)
    macros = window_macros(windows.kernel, windows.stride, windows.padding)
    if name.startswith("max") and positions.dtype == np.uint8:
        macros["BYTE_POSITIONS"] = 1
    if puts:
        small = math.prod(windows.stride) <= (MAX_CELL_LAST if last else MAX_CELL)
        rows, columns = windows.stride if small else (1, 1)
        if small and not last:
            wide = VECTOR_BYTES // element_types(first.dtype)[0].itemsize
            columns = columns if wide % columns else wide
        elements = -(-images.size // (rows * columns))
    else:
        at_once = 1 if last or math.prod(windows.kernel) > MAX_CELL else math.gcd(pooled.width, 2)
        macros["AT_ONCE"] = at_once
        elements = pooled.size // at_once
    if last:
        lanes = math.gcd(images.channels, VECTOR_BYTES // first.dtype.itemsize)
        macros |= {"CHANNELS": images.channels, "LANES": lanes}
        elements = -(-elements // lanes)
    lengths = (*images[:3], *pooled[1:3])  # POOL_NUMBERS
    return [CudaKernel((CudaLaunch(FILE, name, lengths, element_types(first.dtype), elements, definitions=macros),))]


for _name in ("max_pool2d", "max_pool2d_pick", "max_pool2d_put", "avg_pool2d", "avg_pool2d_put"):
    for _arrays in ("", BFLOAT16):
        register(_name + _arrays, "cuda", partial(_rule, _name, False))
        register(_name + CHANNELS_LAST + _arrays, "cuda", partial(_rule, _name, True))
