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
from adtrain.ops.shape import transpose


def _argsort_shape(x: Any, count: int, descending: bool) -> ArrayType:
    if not x.shape or not 0 <= count <= x.shape[-1]:
        raise ShapeError(f"argsort: found {count} of the last axis of shape {x.shape}")
    return ArrayType((*x.shape[:-1], count), np.dtype(np.int64))


def _argsort_reference(x: np.ndarray, count: int, descending: bool) -> np.ndarray:
    if not descending:
        return np.argsort(x, axis=-1, kind="stable")[..., :count]
    # the ascending order from its end; to keep equal elements in order, that of the elements from their end
    order = x.shape[-1] - 1 - np.flip(np.argsort(np.flip(x, -1), axis=-1, kind="stable"), -1)
    return order[..., :count]


def _comparisons(x: Any, count: int, descending: bool) -> int:
    """Of each element with the best ones so far, in a binary search."""
    return x.size * count.bit_length()


argsort_p: Primitive = Primitive("argsort", _argsort_shape, _argsort_reference, flops=_comparisons)
"""The indices of the first ``count`` elements in the stable order along the last axis."""


def argsort(x: ArrayLike, axis: int = -1, descending: bool = False) -> Value:
    """Indices (int64) of the elements in ascending or descending order along ``axis``; the shape is that of ``x``.

    The order is stable, and NaN is larger than every number.

    Raises:
        ShapeError: ``axis`` is out of range.
    """
    value = as_value(x)
    position = normalize_axis("argsort", axis, value.ndim)
    return _first(value, position, value.shape[position], descending)


def _first(x: Value, axis: int, count: int, descending: bool) -> Value:
    """Indices of the first ``count`` elements in the stable order along ``axis``."""
    axes = [i for i in range(x.ndim) if i != axis] + [axis]
    found = bind(argsort_p, transpose(x, axes), count=count, descending=descending)
    return transpose(found, sorted(range(x.ndim), key=axes.__getitem__))


def sort(x: ArrayLike, axis: int = -1, descending: bool = False) -> Value:
    """The elements in ascending or descending order along ``axis``; `argsort` says in which, and gives their indices.

    Raises:
        ShapeError: ``axis`` is out of range.
    """
    value = as_value(x)
    position = normalize_axis("sort", axis, value.ndim)
    return pick(value, _first(value, position, value.shape[position], descending), position)


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
    indices = _first(value, position, int(k), largest)
    return pick(value, indices, position), indices
