"""Indexing with brackets: ``x[index]``."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import ReverseTracer
from adtrain.core.errors import DTypeError, ShapeError, TraceError, user_line
from adtrain.ops.broadcasting import broadcast_to, reshape
from adtrain.ops.common import as_value, broadcast_shapes
from adtrain.ops.compare import greater_equal, less, where
from adtrain.ops.elementwise import astype
from adtrain.ops.index import take
from adtrain.ops.shape import bounds, flip, slice, transpose


def _is_index(item: Any) -> bool:
    """Whether an item is an integer or an array."""
    return not (item is None or item is Ellipsis or isinstance(item, builtins.slice))


def _is_mask(item: Any) -> bool:
    if isinstance(item, list):
        return as_value(item).dtype == np.bool_
    return isinstance(item, (Value, np.ndarray)) and item.dtype == np.bool_


def _places(mask: Value, lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Where ``mask`` is True: an array of indices for each of its axes, which have these ``lengths``."""
    while isinstance(mask, ReverseTracer):
        mask = mask.primal  # bool has no derivative
    if not isinstance(mask, Array):
        raise TraceError(
            f"{user_line()}: indexing: how many elements a boolean mask selects is not known while a function is "
            "traced or mapped; use ops.where"
        )
    if mask.ndim == 0 or mask.shape != tuple(lengths[: mask.ndim]):
        raise ShapeError(f"indexing: found a boolean mask of shape {mask.shape} for axes of lengths {tuple(lengths)}")
    return np.nonzero(mask.numpy())


def _expanded(x: Value, index: Any) -> tuple[list[Any], bool]:
    """The items of an index, and whether those that are indices are neighbours.

    There is an item for each axis, without ``...``. A mask is replaced by the indices where it is True.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    if builtins.sum(item is Ellipsis for item in given) > 1:
        raise ShapeError("indexing: found more than one '...'")
    masks = {i: as_value(item) for i, item in enumerate(given) if _is_mask(item)}
    used = builtins.sum(
        masks[i].ndim if i in masks else item is not None and item is not Ellipsis for i, item in enumerate(given)
    )
    if used > x.ndim:
        raise ShapeError(f"indexing: found {used} indices for shape {x.shape}")
    if not builtins.any(item is Ellipsis for item in given):
        given.append(Ellipsis)
    found: list[Any] = []
    axis = 0
    for i, item in enumerate(given):
        if i in masks:
            new: Sequence[Any] = _places(masks[i], x.shape[axis:])
        else:
            new = [builtins.slice(None)] * (x.ndim - used) if item is Ellipsis else [item]
        found += new
        axis += builtins.sum(each is not None for each in new)
    places = [i for i, item in enumerate(given) if _is_index(item)]
    return found, not places or places[-1] - places[0] < len(places)


def getitem(x: Value, index: Any) -> Value:
    """``x[index]`` for integers, slices, ``...``, None, arrays of integers, and boolean masks, as in NumPy.

    Several arrays are broadcast together: ``x[i, j]`` has the elements ``x[i[k], j[k]]``. An integer beside an array is
    an index array too, and a mask is the index arrays ``mask.nonzero()``. If a slice, ``...`` or None stands between
    them, the axes of the index arrays come first in the result.

    Raises:
        ShapeError: there are too many indices, one is out of range, index arrays do not broadcast together, or the
            shape of a mask is not that of the axes it stands for. DTypeError: an index is of another type.
        TraceError: a boolean mask is a traced value.
    """
    entries, neighbours = _expanded(x, index)
    starts: list[int] = []
    stops: list[int] = []
    steps: list[int] = []
    lengths: list[int] = []
    flips: list[int] = []
    gathers: dict[int, Any] = {}  # from an axis of the sliced array to its index array
    for item in entries:
        if item is None:
            lengths.append(1)
            continue
        axis, n = len(starts), x.shape[len(starts)]
        start, stop, step, flipped = 0, n, 1, False
        if isinstance(item, builtins.slice):
            start, stop, step, flipped = bounds(item, n)
            lengths.append(-(-(stop - start) // step))
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            if not -n <= item < n:
                raise ShapeError(f"indexing: index {item} is out of range for axis {axis} of shape {x.shape}")
            start, stop = int(item) % n, int(item) % n + 1
        elif isinstance(item, (Value, np.ndarray, list)):
            gathers[len(lengths)] = np.zeros(0, np.int64) if isinstance(item, list) and not item else item
            lengths.append(n)
        else:
            raise DTypeError(f"indexing: found {type(item).__name__}, expected integers, slices, None, ... or an array")
        starts.append(start)
        stops.append(stop)
        steps.append(step)
        if flipped:
            flips.append(axis)
    out = slice(x, starts, stops, steps)
    out = reshape(flip(out, flips) if flips else out, lengths)
    return _gathered(out, gathers, neighbours) if gathers else out


def _gathered(x: Value, gathers: dict[int, Any], neighbours: bool) -> Value:
    """The elements of ``x`` at index arrays for some axes: instead of these axes, or first if not ``neighbours``."""
    axes = list(gathers)
    first, count = axes[0], len(axes)
    if axes != list(range(first, first + count)):  # then there is an item between them, so they come first
        x = transpose(x, (*axes, *(i for i in range(x.ndim) if i not in axes)))
        first = 0
    lengths = x.shape[first : first + count]
    if count > 1:
        x = reshape(x, (*x.shape[:first], prod(lengths), *x.shape[first + count :]))
        indices = _flat_indices(list(gathers.values()), lengths, x.device)
    else:
        indices = gathers[axes[0]]
    out = take(x, indices, first)
    if neighbours or first == 0:
        return out
    gathered = range(first, first + out.ndim - x.ndim + 1)
    return transpose(out, (*gathered, *(i for i in range(out.ndim) if i not in gathered)))


def _flat_indices(given: Sequence[Any], lengths: Sequence[int], device: str) -> Value:
    """Index arrays of axes of these ``lengths``, broadcast together, as one index array of these axes as one.

    Traced indices are checked when the function runs: one out of range gives the product of the lengths, at which the
    gather fails.
    """
    values = [i if isinstance(i, Value) else array(i, device=device) for i in given]
    shape = broadcast_shapes("indexing", *(i.shape for i in values))
    size = prod(lengths)
    flat = valid = None
    for i, n in zip(values, lengths, strict=True):
        if i.dtype.kind not in "iu":
            raise DTypeError(f"indexing: found an index array of {i.dtype}, expected integers")
        i = astype(i, np.int64)
        if isinstance(i, Array) and i.device == "cpu":
            _check_range(i.numpy(), n)
        else:
            inside = greater_equal(i, -n) * less(i, n)
            valid = inside if valid is None else valid * inside
        positive = where(less(i, 0), i + n, i)
        flat = positive if flat is None else flat * n + positive
    assert flat is not None
    flat = broadcast_to(flat, shape)
    return flat if valid is None else where(valid, flat, size)


def _check_range(indices: np.ndarray, length: int) -> None:
    wrong = (indices < -length) | (indices >= length)
    if wrong.any():
        raise ShapeError(f"indexing: index {indices[wrong].flat[0]} is out of range for length {length}")
