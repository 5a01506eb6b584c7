"""The rules for pooling (`kernels/cuda/pool/pool.cu`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering.shapes import element_types

FILE = "pool/pool.cu"
MAX_CELL = 16
"""Elements of a stride, or of a window, up to which a thread takes several."""
VECTOR_BYTES = 16
"""What a thread writes at once."""


def _reads_windows(name: str, x: Sequence[int], y: Sequence[int], windows: Any, dtype: np.dtype) -> list[CudaKernel]:
    """A kernel with a thread for one or two neighbouring outputs. x, y: shapes of the image and the pooled one."""
    at_once = 1 if math.prod(windows.kernel) > MAX_CELL else math.gcd(y[3], 2)
    macros = {**_macros(windows), "AT_ONCE": at_once}
    return _kernel(name, x, y, dtype, math.prod(y) // at_once, macros)


def _writes_cells(name: str, x: Sequence[int], y: Sequence[int], windows: Any, dtype: np.dtype) -> list[CudaKernel]:
    """A kernel with a thread for each cell of the image."""
    cell = math.prod(_cell(windows, element_types(dtype)[0].itemsize)) if math.prod(windows.stride) <= MAX_CELL else 1
    return _kernel(name, x, y, dtype, -(-math.prod(x) // cell), _macros(windows))


def _kernel(
    name: str, x: Sequence[int], y: Sequence[int], dtype: np.dtype, elements: int, macros: Mapping[str, int]
) -> list[CudaKernel]:
    lengths = (x[0] * x[1], *x[2:], *y[2:])  # POOL_NUMBERS
    types = element_types(dtype)
    return [CudaKernel((CudaLaunch(FILE, name, lengths, types, elements=elements, definitions=macros),))]


def max_pool2d(target: Target, x: Any, windows: Any) -> list[CudaKernel]:
    return _reads_windows("max_pool2d", x.shape, windows.output_shape("pooling", x.shape), windows, x.dtype)


def max_pool2d_pick(target: Target, x: Any, where: Any, windows: Any) -> list[CudaKernel]:
    return _reads_windows("max_pool2d_pick", x.shape, where.shape, windows, x.dtype)


def max_pool2d_put(target: Target, ct: Any, where: Any, windows: Any, shape: Sequence[int]) -> list[CudaKernel]:
    return _writes_cells("max_pool2d_put", shape, ct.shape, windows, ct.dtype)


def avg_pool2d(target: Target, x: Any, windows: Any) -> list[CudaKernel]:
    return _reads_windows("avg_pool2d", x.shape, windows.output_shape("pooling", x.shape), windows, x.dtype)


def avg_pool2d_put(target: Target, ct: Any, windows: Any, shape: Sequence[int]) -> list[CudaKernel]:
    return _writes_cells("avg_pool2d_put", shape, ct.shape, windows, ct.dtype)


def _cell(windows: Any, itemsize: int) -> tuple[int, int]:
    """Rows and columns of the image that a thread writes."""
    rows, columns = windows.stride
    wide = VECTOR_BYTES // itemsize
    return rows, columns if wide % columns else wide


def _macros(windows: Any) -> dict[str, int]:
    values = (*windows.kernel, *windows.stride, *windows.padding)
    return dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), values, strict=True))


for _rule in (max_pool2d, max_pool2d_pick, max_pool2d_put, avg_pool2d, avg_pool2d_put):
    register(_rule.__name__, "cuda", _rule)
    register(f"{_rule.__name__}_bfloat16", "cuda", _rule)
