"""Gathers: take, take_along_axis, one_hot, embedding; the scatters that are their transposes; ``x[index]``."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import ReverseTracer
from adtrain.core.axes import Axes, Labels, letters
from adtrain.core.batching_rules import all_mapped, fold, move_axes, unfold
from adtrain.core.errors import DTypeError, ShapeError, TraceError, user_line
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, dtype_of
from adtrain.ops.common import ArrayLike, as_value, broadcast_shapes, broadcast_to, normalize_axis, reshape
from adtrain.ops.compare import greater_equal, less, where
from adtrain.ops.create import full
from adtrain.ops.elementwise import astype
from adtrain.ops.shape import bounds, flip, slice, transpose

__all__ = ["embedding", "getitem", "one_hot", "put_rows", "take", "take_along_axis"]


def _require_integers(name: str, indices: Any) -> None:
    if indices.dtype.kind not in "iu":
        raise DTypeError(f"{name}: the indices are {indices.dtype}, expected integers")


def _in_range(name: str, indices: np.ndarray, length: int) -> np.ndarray:
    """The indices, after a check.

    Raises:
        ShapeError: one is negative, or not below ``length``.
    """
    wrong = (indices < 0) | (indices >= length)
    if wrong.any():
        raise ShapeError(f"{name}: index {indices[wrong].flat[0]} is out of range for length {length}")
    return indices


def _take_shape(x: Any, indices: Any, axis: int) -> ArrayType:
    _require_integers("take", indices)
    return ArrayType(x.shape[:axis] + indices.shape + x.shape[axis + 1 :], x.dtype)


def _scatter_add_shape(ct: Any, indices: Any, axis: int, length: int) -> ArrayType:
    _require_integers("scatter_add", indices)
    return ArrayType((*ct.shape[:axis], length, *ct.shape[axis + len(indices.shape) :]), ct.dtype)


def _scatter_add_reference(ct: np.ndarray, indices: np.ndarray, axis: int, length: int) -> np.ndarray:
    moved = np.moveaxis(ct, range(axis, axis + indices.ndim), range(indices.ndim))
    total = np.float64 if ct.dtype == np.float32 else ct.dtype  # the error does not grow with the number of summands
    out = np.zeros((length, *moved.shape[indices.ndim :]), total)
    np.add.at(out, _in_range("scatter_add", indices, length), moved)
    return np.moveaxis(out.astype(ct.dtype), 0, axis)


def _gathered(x: Any, indices: Any, axis: int) -> tuple[int, int]:
    """How many elements a gather reads: one of x per element of the result, and the indices."""
    return x.size // max(x.shape[axis], 1) * indices.size, indices.size


def _indices_of_all(indices: Value, length: int) -> Value:
    """The indices of each member into the entries of all members, ``length`` of each, as one axis.

    One that is out of range for its own member is out of range for all.
    """
    members = indices.shape[0]
    starts = array(np.arange(members) * length, device=indices.device)
    wide = astype(indices, np.int64)
    shifted = wide + reshape(starts, (members,) + (1,) * (indices.ndim - 1))
    return where(less(wide, 0), wide, where(less(wide, length), shifted, wide + members * length))


def _take_batch(op: Any, mapped: Any, x: Value, indices: Value, axis: int) -> Value:
    if mapped == (True, False):
        return op(x, indices, axis=axis + 1)
    if mapped == (False, True):
        return move_axes(op(x, indices, axis=axis), axis, 0)
    entries = move_axes(x, axis + 1, 1)
    out = op(fold(entries), _indices_of_all(indices, entries.shape[1]), axis=0)
    return move_axes(out, 1, axis + 1, indices.ndim - 1)


def _scatter_add_batch(op: Any, mapped: Any, ct: Value, indices: Value, axis: int, length: int) -> Value:
    if not mapped[1]:
        return op(ct, indices, axis=axis + 1, length=length)
    members = indices.shape[0]
    entries = move_axes(all_mapped(mapped, (ct, indices))[0], axis + 1, 1, indices.ndim - 1)
    out = op(entries, _indices_of_all(indices, length), axis=0, length=members * length)
    return move_axes(unfold(out, members), 1, axis + 1)


def _around(ndim: int, axis: int, inside: int) -> tuple[Labels, Labels, Labels]:
    """Labels for the axes before ``axis``, for ``inside`` axes in its place, and for those after it."""
    labels = letters(ndim - 1 + inside)
    return labels[:axis], labels[axis : axis + inside], labels[axis + inside :]


def _take_axes(x: Any, indices: Any, axis: int) -> Axes:
    before, entries, after = _around(x.ndim, axis, indices.ndim)
    return Axes(((*before, "", *after), entries), ((*before, *entries, *after),))


def _scatter_add_axes(ct: Any, indices: Any, axis: int, length: int) -> Axes:
    before, entries, after = _around(ct.ndim - indices.ndim + 1, axis, indices.ndim)
    return Axes(((*before, *entries, *after), entries), ((*before, "", *after),), frozenset(entries))


take_p: Primitive = Primitive(
    "take",
    _take_shape,
    lambda x, indices, axis: np.take(x, _in_range("take", indices, x.shape[axis]), axis),
    [lambda out, x, indices, axis: partial(_scatter_add, indices=indices, axis=axis, length=x.shape[axis])],
    no_flops,
    reads=_gathered,
    traits=(Trait.GATHER, Trait.LINEAR),
    batch=_take_batch,
    axes=_take_axes,
)
scatter_add_p: Primitive = Primitive(
    "scatter_add",
    _scatter_add_shape,
    _scatter_add_reference,
    [lambda out, ct, indices, axis, length: lambda u: bind(take_p, u, indices, axis=axis)],
    lambda ct, indices, axis, length: ct.size,
    batch=_scatter_add_batch,
    axes=_scatter_add_axes,
    traits=(Trait.LINEAR,),
)


def _along_shape(x: Any, indices: Any, axis: int) -> ArrayType:
    _require_integers("take_along_axis", indices)
    expected, found = (s[:axis] + s[axis + 1 :] for s in (x.shape, indices.shape))
    if len(indices.shape) != len(x.shape) or expected != found:
        raise ShapeError(f"take_along_axis: indices of shape {indices.shape} do not fit {x.shape} beside axis {axis}")
    return ArrayType(indices.shape, x.dtype)


def _scatter_along_reference(ct: np.ndarray, indices: np.ndarray, axis: int, length: int) -> np.ndarray:
    out = np.zeros((*ct.shape[:axis], length, *ct.shape[axis + 1 :]), ct.dtype)
    positions: list[np.ndarray] = list(np.indices(ct.shape, sparse=True))
    positions[axis] = _in_range("scatter_along_axis", indices, length)
    np.add.at(out, tuple(positions), ct)
    return out


def _take_along_axes(x: Any, indices: Any, axis: int) -> Axes:
    before, (entries,), after = _around(x.ndim, axis, 1)
    return Axes(((*before, "", *after), (*before, entries, *after)), ((*before, entries, *after),), leading=True)


def _scatter_along_axes(ct: Any, indices: Any, axis: int, length: int) -> Axes:
    labels = letters(ct.ndim)
    return Axes((labels, labels), ((*labels[:axis], "", *labels[axis + 1 :]),), frozenset(labels[axis]), leading=True)


take_along_axis_p: Primitive = Primitive(
    "take_along_axis",
    _along_shape,
    lambda x, indices, axis: np.take_along_axis(x, _in_range("take_along_axis", indices, x.shape[axis]), axis),
    [lambda out, x, indices, axis: partial(_scatter_along_axis, indices=indices, axis=axis, length=x.shape[axis])],
    no_flops,
    reads=lambda x, indices, axis: (indices.size, indices.size),
    axes=_take_along_axes,
    traits=(Trait.LINEAR,),
)
scatter_along_axis_p: Primitive = Primitive(
    "scatter_along_axis",
    lambda ct, indices, axis, length: ArrayType((*ct.shape[:axis], length, *ct.shape[axis + 1 :]), ct.dtype),
    _scatter_along_reference,
    [lambda out, ct, indices, axis, length: lambda u: bind(take_along_axis_p, u, indices, axis=axis)],
    lambda ct, indices, axis, length: ct.size,
    axes=_scatter_along_axes,
    traits=(Trait.LINEAR,),
)


def _scatter_add(ct: Value, indices: Value, axis: int, length: int) -> Value:
    return bind(scatter_add_p, ct, indices, axis=axis, length=length)


def _scatter_along_axis(ct: Value, indices: Value, axis: int, length: int) -> Value:
    return bind(scatter_along_axis_p, ct, indices, axis=axis, length=length)


def _put_rows_shape(x: Any, rows: Any, positions: Any, axis: int) -> ArrayType:
    _require_integers("put_rows", positions)
    expected = x.shape[:axis] + x.shape[axis + 1 :]
    if rows.shape != expected or positions.shape != x.shape[:1]:
        raise ShapeError(
            f"put_rows: found rows {rows.shape} and positions {positions.shape}, expected {expected} and {x.shape[:1]}"
        )
    if rows.dtype != x.dtype:
        raise DTypeError(f"put_rows: found rows {rows.dtype}, expected {x.dtype}")
    return ArrayType(x.shape, x.dtype)


def _put_rows_reference(x: np.ndarray, rows: np.ndarray, positions: np.ndarray, axis: int) -> np.ndarray:
    out = np.array(x)
    places = _in_range("put_rows", positions, x.shape[axis]).reshape(-1, *(1,) * (x.ndim - 1))
    np.put_along_axis(out, places, np.expand_dims(rows, axis), axis)
    return out


def _put_rows_axes(x: Any, rows: Any, positions: Any, axis: int) -> Axes:
    before, _, after = _around(x.ndim, axis, 1)
    return Axes(((*before, "", *after), (*before, *after), before[:1]), ((*before, "", *after),))


def _rows_at(x: Value, positions: Value, axis: int) -> Value:
    """The row of each sample at its position: the transpose of `put_rows`."""
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    places = broadcast_to(reshape(positions, (-1, *(1,) * (x.ndim - 1))), shape)
    return reshape(pick(x, places, axis), x.shape[:axis] + x.shape[axis + 1 :])


put_rows_p: Primitive = Primitive(
    "put_rows",
    _put_rows_shape,
    _put_rows_reference,
    [
        lambda out, x, rows, positions, axis: (
            lambda ct: bind(put_rows_p, ct, full(rows.shape, 0, rows.dtype, rows.device), positions, axis=axis)
        ),
        lambda out, x, rows, positions, axis: lambda ct: _rows_at(ct, positions, axis),
    ],
    no_flops,
    reads=lambda x, rows, positions, axis: (0, rows.size, positions.size),
    traits=(Trait.UPDATE, Trait.LINEAR),
    axes=_put_rows_axes,
)


def _one_hot_reference(indices: np.ndarray, num_classes: int, dtype: np.dtype) -> np.ndarray:
    return (_in_range("one_hot", indices, num_classes)[..., None] == np.arange(num_classes)).astype(dtype)


def _one_hot_shape(indices: Any, num_classes: int, dtype: np.dtype) -> ArrayType:
    _require_integers("one_hot", indices)
    return ArrayType((*indices.shape, num_classes), dtype)


one_hot_p: Primitive = Primitive(
    "one_hot",
    _one_hot_shape,
    _one_hot_reference,
    flops=no_flops,
    axes="*->*.",
)


def take(x: ArrayLike, indices: ArrayLike, axis: int = 0) -> Value:
    """Entries of ``axis`` by position: shape ``x.shape[:axis] + indices.shape + x.shape[axis + 1:]``.

    Raises:
        ShapeError: an index is out of range (negative ones count from the end).
    """
    value = as_value(x)
    axis = normalize_axis("take", axis, value.ndim)
    return bind(take_p, value, _from_the_end(_indices(indices, value), value.shape[axis]), axis=axis)


def take_along_axis(x: ArrayLike, indices: ArrayLike, axis: int) -> Value:
    """``out[i, j] = x[i, indices[i, j]]`` for axis 1, and likewise for others; ``indices`` has the shape of the output.

    Raises:
        ShapeError: an index is out of range (negative ones count from the end), or the other axes differ.
    """
    value = as_value(x)
    axis = normalize_axis("take_along_axis", axis, value.ndim)
    return bind(take_along_axis_p, value, _from_the_end(_indices(indices, value), value.shape[axis]), axis=axis)


def put_rows(x: ArrayLike, rows: ArrayLike, positions: ArrayLike, axis: int) -> Value:
    """``x`` with a row of each sample replaced: ``out[b, :, positions[b]] = rows[b]`` for axis 2, likewise for others.

    In a Program that does not read ``x`` again, the rows are written into its memory, and nothing is copied.

    Args:
        x: (samples, ...).
        rows: of the shape of ``x`` without ``axis``.
        positions: integers (samples,).
        axis: not 0.

    Raises:
        ShapeError: the shapes do not fit, a position is not in [0, x.shape[axis]), or the axis is that of the samples.
        DTypeError: the rows have another type than ``x``, or the positions are not integers.
    """
    value = as_value(x)
    axis = normalize_axis("put_rows", axis, value.ndim)
    if axis == 0:
        raise ShapeError("put_rows: found axis 0, which counts the samples; expected another one")
    given = as_value(rows)
    given = given if isinstance(given, Value) else given.to(value.device)
    return bind(put_rows_p, value, given, _indices(positions, value), axis=axis)


def pick(x: Value, indices: Value, axis: int) -> Value:
    """`take_along_axis` in which a negative index is an error."""
    return bind(take_along_axis_p, x, indices, axis=axis)


@checked_options
def one_hot(indices: ArrayLike, num_classes: int, dtype: Any = np.float32) -> Value:
    """Rows that are 1 at the index and 0 elsewhere: shape ``indices.shape + (num_classes,)``.

    Raises:
        ShapeError: an index is not in [0, num_classes).
    """
    return bind(one_hot_p, as_value(indices), num_classes=num_classes, dtype=dtype_of("one_hot", dtype))


def embedding(indices: ArrayLike, weight: ArrayLike) -> Value:
    """Rows of ``weight`` (entries, features) by index: shape ``indices.shape + (features,)``.

    Raises:
        ShapeError: an index is not in [0, entries).
    """
    table = as_value(weight)
    return bind(take_p, table, _indices(indices, table), axis=normalize_axis("embedding", 0, table.ndim))


def _from_the_end(indices: Value, length: int) -> Value:
    """Negative indices count from the end, as in NumPy. Indices out of range stay as they are: errors name them."""
    if indices.dtype.kind != "i":
        return indices
    return where(less(indices, 0), where(less(indices, -length), indices, indices + length), indices)


def _indices(indices: ArrayLike, source: Value) -> Value:
    value = as_value(indices)
    return value if isinstance(indices, Value) else value.to(source.device)


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
    if sum(item is Ellipsis for item in given) > 1:
        raise ShapeError("indexing: found more than one '...'")
    masks = {i: as_value(item) for i, item in enumerate(given) if _is_mask(item)}
    used = sum(
        masks[i].ndim if i in masks else item is not None and item is not Ellipsis for i, item in enumerate(given)
    )
    if used > x.ndim:
        raise ShapeError(f"indexing: found {used} indices for shape {x.shape}")
    if not any(item is Ellipsis for item in given):
        given.append(Ellipsis)
    found: list[Any] = []
    axis = 0
    for i, item in enumerate(given):
        if i in masks:
            new: Sequence[Any] = _places(masks[i], x.shape[axis:])
        else:
            new = [builtins.slice(None)] * (x.ndim - used) if item is Ellipsis else [item]
        found += new
        axis += sum(each is not None for each in new)
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
    x = as_value(x)
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
    return _elements_at(out, gathers, neighbours) if gathers else out


def _elements_at(x: Value, gathers: dict[int, Any], neighbours: bool) -> Value:
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
