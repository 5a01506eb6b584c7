"""The stable order of elements along an axis, and what follows from it: argsort, sort, topk.

Equal elements keep their order. NaN is larger than every number, as in NumPy and PyTorch: last in ascending order,
first in descending order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.common import ArrayLike, as_value, normalize_axis
from adtrain.ops.index import pick
from adtrain.ops.shape import slice, transpose


def _argsort_shape(x: Any, descending: bool) -> ArrayType:
    if not x.shape:
        raise ShapeError("argsort: found shape (), expected at least one axis")
    return ArrayType(x.shape, np.dtype(np.int64))


def _argsort_reference(x: np.ndarray, descending: bool) -> np.ndarray:
    if not descending:
        return np.argsort(x, axis=-1, kind="stable")
    # the ascending order from its end; to keep equal elements in order, that of the elements from their end
    return x.shape[-1] - 1 - np.flip(np.argsort(np.flip(x, -1), axis=-1, kind="stable"), -1)


argsort_p: Primitive = Primitive(
    "argsort",
    _argsort_shape,
    _argsort_reference,
    flops=lambda x, descending: x.size * max(x.shape[-1] - 1, 0).bit_length(),  # comparisons
)


def argsort(x: ArrayLike, axis: int = -1, descending: bool = False) -> Value:
    """Indices (int64) of the elements in ascending or descending order along ``axis``; the shape is that of ``x``.

    The order is stable, and NaN is larger than every number.

    Raises:
        ShapeError: ``axis`` is out of range.
    """
    value = as_value(x)
    position = normalize_axis("argsort", axis, value.ndim)
    order = [i for i in range(value.ndim) if i != position] + [position]
    found = bind(argsort_p, transpose(value, order), descending=descending)
    return transpose(found, sorted(range(value.ndim), key=order.__getitem__))


def sort(x: ArrayLike, axis: int = -1, descending: bool = False) -> Value:
    """The elements in ascending or descending order along ``axis``; `argsort` says in which, and gives their indices.

    Raises:
        ShapeError: ``axis`` is out of range.
    """
    value = as_value(x)
    position = normalize_axis("sort", axis, value.ndim)
    return pick(value, argsort(value, position, descending), position)


def topk(x: ArrayLike, k: int, axis: int = -1, largest: bool = True) -> tuple[Value, Value]:
    """The ``k`` largest elements along ``axis`` in descending order, or the smallest in ascending order.

    Of equal elements, those of the lowest indices are taken. NaN is larger than every number.

    Returns:
        The elements, and their indices (int64), with length ``k`` along ``axis``.

    Raises:
        ShapeError: ``axis`` is out of range, or ``k`` is not from 0 to its length.
    """
    value = as_value(x)
    position = normalize_axis("topk", axis, value.ndim)
    if not 0 <= k <= value.shape[position]:
        raise ShapeError(f"topk: found k = {k}, expected 0 to {value.shape[position]}, the length of axis {position}")
    stops = [k if i == position else n for i, n in enumerate(value.shape)]
    indices = slice(argsort(value, position, descending=largest), [0] * value.ndim, stops)
    return pick(value, indices, position), indices
