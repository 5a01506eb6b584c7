"""argsort, sort and topk, by the stable order of the elements along an axis.

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
        raise ShapeError(f"argsort: found count {count} for the last axis of shape {x.shape}")
    return ArrayType((*x.shape[:-1], count), np.dtype(np.int64))


def _argsort_reference(x: np.ndarray, count: int, descending: bool) -> np.ndarray:
    if not descending:
        return np.argsort(x, axis=-1, kind="stable")[..., :count]
    # x and its ascending order are flipped: the order is then descending, and equal elements keep theirs
    order = x.shape[-1] - 1 - np.flip(np.argsort(np.flip(x, -1), axis=-1, kind="stable"), -1)
    return order[..., :count]


def _comparisons(x: Any, count: int, descending: bool) -> int:
    """A binary search for each element among the first ``count`` so far."""
    return x.size * count.bit_length()


argsort_p: Primitive = Primitive("argsort", _argsort_shape, _argsort_reference, flops=_comparisons, axes="*.->*.")
"""The indices of the first ``count`` elements in the stable order along the last axis."""


def argsort(x: ArrayLike, axis: int = -1, descending: bool = False) -> Value:
    """Indices (int64) that sort ``x`` in ascending or descending order along ``axis``; of the shape of ``x``.

    The order is stable, and NaN is larger than every number.

    Raises:
        ShapeError: ``axis`` is out of range.
    """
    value = as_value(x)
    position = normalize_axis("argsort", axis, value.ndim)
    return _sorted_indices(value, position, value.shape[position], descending)


def _sorted_indices(x: Value, axis: int, count: int, descending: bool) -> Value:
    """Indices of the first ``count`` elements in the stable order along ``axis``."""
    axes = [i for i in range(x.ndim) if i != axis] + [axis]
    found = bind(argsort_p, transpose(x, axes), count=count, descending=descending)
    return transpose(found, sorted(range(x.ndim), key=axes.__getitem__))


def sort(x: ArrayLike, axis: int = -1, descending: bool = False) -> Value:
    """The elements in ascending or descending order along ``axis``; `argsort` gives their indices.

    Raises:
        ShapeError: ``axis`` is out of range.
    """
    value = as_value(x)
    position = normalize_axis("sort", axis, value.ndim)
    return pick(value, _sorted_indices(value, position, value.shape[position], descending), position)


def topk(x: ArrayLike, k: int, axis: int = -1, largest: bool = True) -> tuple[Value, Value]:
    """The ``k`` largest elements along ``axis`` in descending order, or the smallest in ascending order.

    Among equal elements, those of the lowest indices come first. NaN is larger than every number.

    Returns:
        The elements, and their indices (int64), with length ``k`` along ``axis``.

    Raises:
        ShapeError: ``axis`` is out of range, or ``k`` is not from 0 to its length.
    """
    value = as_value(x)
    position = normalize_axis("topk", axis, value.ndim)
    if not 0 <= k <= value.shape[position]:
        raise ShapeError(f"topk: found k = {k}, expected 0 to {value.shape[position]}, the length of axis {position}")
    indices = _sorted_indices(value, position, int(k), largest)
    return pick(value, indices, position), indices
