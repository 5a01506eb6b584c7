"""Gathers, scatters along an axis and one_hot: `index/index.cu`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering import indexing
from adtrain.lowering.cuda.reduce import vector_width


def launch(name: str, numbers: indexing.Lengths, x: Any, indices: Any, elements: int, width: int = 1) -> CudaLaunch:
    """A kernel of an array and indices, with ``elements`` vectors of ``width`` to compute."""
    dtypes, macros = (x.dtype, indices.dtype), {"WIDTH": width}
    return CudaLaunch("index/index.cu", name, numbers, dtypes, elements, definitions=macros, checked=True)


def take(target: Target, x: Any, indices: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, _, inner, count = indexing.take(x, indices, axis)
    width = vector_width(inner, x.dtype.itemsize)
    return [CudaKernel((launch("take", numbers, x, indices, outer * inner * count // width, width),))]


def take_along_axis(target: Target, x: Any, indices: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, _, inner, count = indexing.take_along_axis(x, indices, axis)
    return [CudaKernel((launch("take_along_axis", numbers, x, indices, outer * inner * count),))]


def scatter_along_axis(target: Target, ct: Any, indices: Any, axis: int, length: int) -> list[CudaKernel]:
    """The candidates: one pass, where there is one index per row; or zeros, then a thread per row that adds."""
    numbers = outer, _, inner, count = indexing.scatter_along_axis(ct, indices, axis, length)
    width = vector_width(inner if inner > 1 else length, ct.dtype.itemsize)
    clear = launch("clear_along_axis", numbers, ct, indices, outer * length * inner // width, width)
    add = launch("scatter_along_axis", numbers, ct, indices, outer * inner)
    one_pass = CudaKernel((replace(clear, name="scatter_one"),))
    return [*([one_pass] if count == 1 else []), CudaKernel((clear, add))]


def one_hot(target: Target, indices: Any, num_classes: int, dtype: np.dtype) -> list[CudaKernel]:
    count = math.prod(indices.shape)
    numbers, dtypes = (count, num_classes), (dtype, indices.dtype)
    return [CudaKernel((CudaLaunch("index/index.cu", "one_hot", numbers, dtypes, count * num_classes, checked=True),))]


register("take", "cuda", take)
register("take_along_axis", "cuda", take_along_axis)
register("scatter_along_axis", "cuda", scatter_along_axis)
register("one_hot", "cuda", one_hot)
