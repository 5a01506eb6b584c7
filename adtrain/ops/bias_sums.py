"""Gradients that a GPU computes together with the gradient of a convolution's bias: a sum of what they read anyway.

They occur only in optimised Programs, where a pass puts each in the place of two equations, and have no derivatives.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain.core.array import ArrayType
from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import Primitive
from adtrain.ops import conv_cuda
from adtrain.ops.broadcasting import sum_p
from adtrain.ops.conv import weight_grad_p
from adtrain.ops.pool import CELL, Windows, max_pool2d_put_p

OF_BIAS = (0, 2, 3)
"""The axes that a bias is added along."""
SUMMING, WARP = 256, 32
"""Threads of a block that sums, as in `kernels/cuda/pool.cu`, and of a warp."""
CELLS, MANY_BLOCKS = 4, 2048
"""Cells of the image that a thread should have, at least, and blocks that there should be, if possible."""


def _summed(x: Any) -> Any:
    return sum_p.implementations["cpu"](x, axes=OF_BIAS)


def _weight_types(x: Any, g: Any, **params: Any) -> tuple[ArrayType, ArrayType]:
    (w,) = weight_grad_p.output_types((x, g), params)
    return w, ArrayType(g.shape[1:2], g.dtype)


conv2d_weight_grad_sum_p = Primitive(
    "conv2d_weight_grad_sum",
    _weight_types,
    {
        "cpu": lambda x, g, **params: (weight_grad_p.implementations["cpu"](x, g, **params), _summed(g)),
        "cuda": conv_cuda.weight_grad_sum,
    },
    flops=lambda x, g, **params: weight_grad_p.cost([x, g], params).flops + g.size,
)
"""(x, g; window, size, precision): conv2d_weight_grad(x, g, ...), and the sum of g for each channel."""


def _put_types(ct: Any, where: Any, windows: Windows, shape: tuple[int, ...]) -> tuple[ArrayType, ArrayType]:
    return ArrayType(shape, ct.dtype), ArrayType(shape[1:2], ct.dtype)


def _put_kernels(ct: Any, where: Any, windows: Windows, shape: tuple[int, ...]) -> tuple[CudaKernel, ...]:
    """The kernel, where all windows lie in the image and a thread has cells of it."""
    if windows.padding != (0, 0) or math.prod(windows.stride) > CELL or ct.size == 0:
        return ()
    (images, channels, *image), (rows, columns) = shape, windows.stride
    wide = 16 // ct.dtype.itemsize
    cells = images * -(-image[0] // rows) * -(-image[1] // (columns if wide % columns else wide))
    parts = min(-(-cells // (SUMMING * CELLS)), -(-MANY_BLOCKS // channels))
    values = (*windows.kernel, *windows.stride, *windows.padding)
    definitions = dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), values, strict=True))
    put = CudaKernel(
        "pool.cu",
        "max_pool2d_put_sum",
        lambda *_, **__: (images * channels, *image, *ct.shape[2:], channels, parts),
        blocks=lambda *_, **__: (channels, parts),
        threads=lambda *_, **__: SUMMING,
        definitions=lambda *_, **__: definitions,
        scratch=lambda *_, **__: channels * parts * ct.dtype.itemsize,
    )
    add = replace(
        put,
        name="max_pool2d_put_sum_parts",
        numbers=lambda *_, **__: (channels, parts),
        blocks=None,
        threads=None,
        elements=lambda *_, **__: channels * WARP,
    )
    return (replace(put, then=add),)


def _put_reference(ct: np.ndarray, where: np.ndarray, **params: Any) -> tuple[np.ndarray, np.ndarray]:
    return max_pool2d_put_p.implementations["cpu"](ct, where, **params), _summed(ct)


max_pool2d_put_sum_p = Primitive(
    "max_pool2d_put_sum",
    _put_types,
    {"cpu": _put_reference, "cuda": _put_kernels},
    flops=lambda ct, where, **params: 2 * ct.size,
)
"""(ct, where; windows, shape): max_pool2d_put(ct, where, ...), and the sum of ct for each channel."""
