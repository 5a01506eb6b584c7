"""Indexing with brackets: ``x[index]``."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from adtrain.core.array import Array, Value, array
from adtrain.core.errors import DTypeError, ShapeError, TraceError, user_line
from adtrain.core.reverse import ReverseTracer
from adtrain.ops.broadcasting import reshape
from adtrain.ops.common import as_value
from adtrain.ops.index import take
from adtrain.ops.shape import bounds, flip, slice, transpose


def _is_index(item: Any) -> bool:
    """Whether an item is an integer or an array of integers."""
    return not (item is None or item is Ellipsis or isinstance(item, builtins.slice))


def _is_mask(item: Any) -> bool:
    if isinstance(item, list):
        return as_value(item).dtype == np.bool_
    return isinstance(item, (Value, np.ndarray)) and item.dtype == np.bool_


def _masked(x: Value, mask: Value) -> Value:
    """The elements of ``x`` where ``mask``, of the shape of the first axes of ``x``, is True: one axis for these."""
    while isinstance(mask, ReverseTracer):
        mask = mask.primal  # bool has no derivative
    if not isinstance(mask, Array):
        raise TraceError(
            f"{user_line()}: indexing: how many elements a boolean mask selects is not known while a function is "
            "traced; use ops.where"
        )
    if mask.ndim == 0 or mask.shape != x.shape[: mask.ndim]:
        raise ShapeError(f"indexing: found a boolean mask of shape {mask.shape} for an array of shape {x.shape}")
    rows = reshape(x, (mask.size, *x.shape[mask.ndim :]))
    return take(rows, array(np.flatnonzero(mask.numpy()), device=x.device), 0)


def getitem(x: Value, index: Any) -> Value:
    """``x[index]`` for integers, slices, ``...``, None, and one array of integers; or for one boolean mask.

    As in NumPy, an integer beside an array is an index array too. If a slice, ``...`` or None stands between them, the
    axes of the index array come first in the result.

    Raises:
        ShapeError: there are too many indices, or one is out of range. DTypeError: an index is of another type.
        TraceError: a boolean mask is a traced value.
    """
    if _is_mask(index):
        return _masked(x, as_value(index))
    given = index if isinstance(index, tuple) else (index,)
    if builtins.any(_is_mask(item) for item in given):
        raise DTypeError("indexing: found a boolean mask beside other indices, expected it alone; write x[mask][...]")
    used = len([i for i in given if i is not None and i is not Ellipsis])
    if used > x.ndim:
        raise ShapeError(f"indexing: found {used} indices for shape {x.shape}")
    if sum(i is Ellipsis for i in given) > 1:
        raise ShapeError("indexing: found more than one '...'")
    if not any(i is Ellipsis for i in given):
        given = (*given, Ellipsis)
    at = next(i for i, item in enumerate(given) if item is Ellipsis)
    entries = [*given[:at], *[builtins.slice(None)] * (x.ndim - used), *given[at + 1 :]]

    starts: list[int] = []
    stops: list[int] = []
    steps: list[int] = []
    lengths: list[int] = []
    flips: list[int] = []
    gathers: list[tuple[int, Value]] = []
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
            gathers.append((len(lengths), as_value(item)))
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
    if len(gathers) > 1:
        raise DTypeError("indexing: found more than one array of indices; use take or take_along_axis")
    if not gathers:
        return out
    axis, indices = gathers[0]
    out = take(out, indices, axis)
    places = [i for i, item in enumerate(given) if _is_index(item)]
    if places[-1] - places[0] >= len(places):  # they are not neighbours
        gathered = range(axis, axis + indices.ndim)
        out = transpose(out, (*gathered, *(i for i in range(out.ndim) if i not in gathered)))
    return out
