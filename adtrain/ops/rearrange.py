"""Parts, repetitions and rotations of arrays; diagonals and triangles of matrices; sorting.

Orders of elements are stable: equal elements keep their order. NaN is larger than every number, as in NumPy and
PyTorch: last in ascending order, first in descending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from adtrain.core.array import Array, Value, array
from adtrain.core.errors import DTypeError, OptionError, ShapeError, TraceError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.common import ArrayLike, as_value, broadcast_to, normalize_axis, reshape
from adtrain.ops.compare import where
from adtrain.ops.index import pick, take
from adtrain.ops.reduce import sum
from adtrain.ops.shape import concatenate, pad_p, slice, transpose

__all__ = ["argsort", "diag", "diagonal", "repeat", "roll", "sort", "split", "tile", "topk", "trace", "tril", "triu"]


def _part(x: Value, axis: int, start: int, stop: int) -> Value:
    """``x[start:stop]`` along ``axis``."""
    starts, stops = [0] * x.ndim, list(x.shape)
    starts[axis], stops[axis] = start, stop
    return slice(x, starts, stops)


def _integers(name: str, what: str, given: int | Sequence[int] | np.ndarray | Array) -> np.ndarray:
    """Static integers, as an array of int64.

    Raises:
        DTypeError: they are of another type. TraceError: they are traced.
    """
    if isinstance(given, Value) and not isinstance(given, Array):
        raise TraceError(f"{name}: {what} is a traced value, expected numbers: the result's shape depends on them")
    try:
        found = np.asarray(given)
    except ValueError:  # lists of different lengths
        found = np.array(None)
    if found.size and found.dtype.kind not in "iu":
        raise DTypeError(f"{name}: found {what} {given}, expected integers")
    return found.astype(np.int64)


def split(x: ArrayLike, indices_or_sections: int | Sequence[int] | np.ndarray, axis: int = 0) -> list[Value]:
    """The parts of ``x`` along ``axis``, as `numpy.split`.

    Args:
        indices_or_sections: the number of equal parts; or the positions at which a part ends and the next begins.
            PyTorch's ``split(x, size)`` is ``split(x, range(size, n, size))``.

    Raises:
        ShapeError: ``axis`` is out of range, or its length is not a multiple of the number of parts.
        DTypeError: a position is not an integer. TraceError: one is traced.
    """
    value = as_value(x)
    position = normalize_axis("split", axis, value.ndim)
    length = value.shape[position]
    given = _integers("split", "indices_or_sections", indices_or_sections)
    if given.ndim > 1:
        raise OptionError(f"split: found indices_or_sections of shape {given.shape}, expected a number or a sequence")
    if given.ndim == 0:
        sections = int(given)
        if sections < 1 or length % sections:
            raise ShapeError(
                f"split: found {sections} sections of an axis of length {length}, expected a number that divides it; "
                "or give the positions of the cuts"
            )
        given = np.arange(1, sections) * (length // sections)
    bounds = [range(length)[: int(cut)].stop for cut in given]  # negative ones count from the end
    return [_part(value, position, start, max(start, stop)) for start, stop in pairwise([0, *bounds, length])]


def tile(x: ArrayLike, reps: int | Sequence[int]) -> Value:
    """``x`` repeated as a whole ``reps[i]`` times along axis i, as `numpy.tile`.

    The shorter of the shape of ``x`` and ``reps`` gets leading ones. PyTorch's ``x.repeat`` is this function.

    Raises:
        OptionError: a number is negative. DTypeError: one is not an integer. TraceError: one is traced.
    """
    value = as_value(x)
    given = np.atleast_1d(_integers("tile", "reps", reps)).tolist()
    if min(given, default=0) < 0:
        raise OptionError(f"tile: found reps {reps}, expected numbers of at least 0")
    ndim = max(value.ndim, len(given))
    times = [1] * (ndim - len(given)) + given
    lengths = [1] * (ndim - value.ndim) + list(value.shape)
    blocks = reshape(value, [length for n in lengths for length in (1, n)])
    repeated = broadcast_to(blocks, [length for pair in zip(times, lengths, strict=True) for length in pair])
    return reshape(repeated, [m * n for m, n in zip(times, lengths, strict=True)])


def repeat(x: ArrayLike, repeats: int | Sequence[int] | np.ndarray | Array, axis: int | None = None) -> Value:
    """Each element of ``axis`` repeated, as `numpy.repeat`; for None of the flattened array.

    Args:
        repeats: how many times; one number for all elements, or one for each. `tile` repeats the array as a whole.

    Raises:
        ShapeError: a number is negative, their number differs from the length of ``axis``, or that is out of range.
        DTypeError: a number is not an integer. TraceError: one is traced.
    """
    value = as_value(x)
    if axis is None or value.ndim == 0:
        value = reshape(value, -1)
    position = normalize_axis("repeat", 0 if axis is None else axis, value.ndim)
    before, length, after = value.shape[:position], value.shape[position], value.shape[position + 1 :]
    times = _integers("repeat", "repeats", repeats)
    if times.ndim > 1 or times.size not in (1, length) or (times < 0).any():
        raise ShapeError(
            f"repeat: found repeats {repeats} for an axis of length {length}, expected one number of at least 0, or "
            "one for each element"
        )
    if times.size != 1:
        return take(value, np.repeat(np.arange(length), times), position)
    count = int(times.item())
    blocks = broadcast_to(reshape(value, (*before, length, 1, *after)), (*before, length, count, *after))
    return reshape(blocks, (*before, length * count, *after))


def roll(x: ArrayLike, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Value:
    """The elements moved by ``shift`` along ``axis``, as `numpy.roll`: those beyond the end begin anew at the start.

    Args:
        shift: a number, or one for each axis.
        axis: an axis or several; None moves along the flattened array.

    Raises:
        ShapeError: an axis is out of range, or the numbers of shifts and axes do not fit.
        DTypeError: a shift is not an integer. TraceError: one is traced.
    """
    value = as_value(x)
    shifts = _integers("roll", "shift", shift)
    if axis is None:
        if shifts.ndim:
            raise OptionError(f"roll: found shifts {shift} without axes, expected one shift, or an axis for each")
        return reshape(_rolled(reshape(value, (value.size,)), int(shifts), 0), value.shape)
    axes = [normalize_axis("roll", each, value.ndim) for each in (axis if isinstance(axis, Sequence) else [axis])]
    if shifts.ndim > 1 or (shifts.ndim and shifts.size not in (1, len(axes)) and len(axes) != 1):
        raise OptionError(f"roll: found shifts {shift} for axes {axis}, expected one for each")
    for each, number in zip(*np.broadcast_arrays(axes, shifts), strict=True):
        value = _rolled(value, int(number), int(each))
    return value


def _rolled(x: Value, shift: int, axis: int) -> Value:
    length = x.shape[axis]
    first = -shift % length if length else 0
    if first == 0:
        return x
    return concatenate([_part(x, axis, first, length), _part(x, axis, 0, first)], axis)


@checked_options
def diagonal(x: ArrayLike, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Value:
    """The elements ``x[i, i + offset]`` of two axes, as `numpy.diagonal`; they are the last axis of the result.

    Raises:
        ShapeError: there are fewer than two axes, an axis is out of range, or both are the same.
    """
    return _diagonal("diagonal", x, offset, axis1, axis2)


def _diagonal(name: str, x: ArrayLike, offset: int, axis1: int, axis2: int) -> Value:
    value = as_value(x)
    rows, columns = (normalize_axis(name, axis, value.ndim) for axis in (axis1, axis2))
    if rows == columns:
        raise ShapeError(f"{name}: axis1 and axis2 are both {rows}, expected two axes")
    others = [i for i in range(value.ndim) if i not in (rows, columns)]
    matrices = transpose(value, (*others, rows, columns))
    m, n = matrices.shape[-2:]
    count = max(0, min(m, n - offset) if offset >= 0 else min(m + offset, n))
    # element (i, i + offset) is number i * (n + 1) + offset of its matrix
    first = (offset if offset >= 0 else -offset * n) if count else 0
    stop = first + (count - 1) * (n + 1) + 1 if count else 0
    flat = reshape(matrices, (*matrices.shape[:-2], m * n))
    leading = flat.ndim - 1
    return slice(flat, (*[0] * leading, first), (*flat.shape[:-1], stop), (*[1] * leading, n + 1))


@checked_options
def diag(x: ArrayLike, k: int = 0) -> Value:
    """For a vector the matrix with it on diagonal ``k``, for a matrix its diagonal ``k``, as `numpy.diag`.

    Args:
        k: 0 is the main diagonal, k > 0 is above it, k < 0 below it.

    Raises:
        ShapeError: ``x`` does not have one or two axes.
    """
    value = as_value(x)
    if value.ndim == 2:
        return _diagonal("diag", value, k, 0, 1)
    if value.ndim != 1:
        raise ShapeError(f"diag: found shape {value.shape}, expected a vector or a matrix; write ops.diagonal(x)")
    side = value.size + abs(k)
    first = k if k >= 0 else -k * side
    zero = value.dtype.type(0).item()
    if value.size == 0:
        flat = bind(pad_p, value, low=(0,), high=(side * side,), gaps=(0,), value=zero)
    else:
        after = side * side - first - (value.size - 1) * (side + 1) - 1
        flat = bind(pad_p, value, low=(first,), high=(after,), gaps=(side,), value=zero)
    return reshape(flat, (side, side))


@checked_options
def trace(x: ArrayLike, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Value:
    """The sum of a diagonal, as `numpy.trace`; integers are summed as int64.

    Raises:
        ShapeError: there are fewer than two axes, an axis is out of range, or both are the same.
    """
    return sum(_diagonal("trace", x, offset, axis1, axis2), -1)


@checked_options
def tril(x: ArrayLike, k: int = 0) -> Value:
    """The elements of the last two axes on diagonal ``k`` and below it, and 0 above it, as `numpy.tril`.

    Raises:
        ShapeError: there are fewer than two axes.
    """
    return _triangle("tril", x, k, below=True)


@checked_options
def triu(x: ArrayLike, k: int = 0) -> Value:
    """The elements of the last two axes on diagonal ``k`` and above it, and 0 below it, as `numpy.triu`.

    Raises:
        ShapeError: there are fewer than two axes.
    """
    return _triangle("triu", x, k, below=False)


def _triangle(name: str, x: ArrayLike, k: int, below: bool) -> Value:
    value = as_value(x)
    if value.ndim < 2:
        raise ShapeError(f"{name}: found shape {value.shape}, expected at least two axes")
    rows = array(np.arange(value.shape[-2])[:, np.newaxis] + k, device=value.device)
    columns = array(np.arange(value.shape[-1]), device=value.device)
    zero = value.dtype.type(0).item()
    return where(columns <= rows if below else columns >= rows, value, zero)


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


@checked_options
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
    indices = _sorted_indices(value, position, k, largest)
    return pick(value, indices, position), indices
