"""Parts, repetitions and rotations of arrays: split, tile, repeat and roll."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from adtrain.core.array import Array, Value
from adtrain.core.errors import DTypeError, OptionError, ShapeError, TraceError
from adtrain.ops.broadcasting import broadcast_to, reshape
from adtrain.ops.common import ArrayLike, as_value, normalize_axis
from adtrain.ops.index import take
from adtrain.ops.shape import concatenate, slice


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
    found = np.asarray(given)
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
    axes = [axis] if isinstance(axis, (int, np.integer)) else list(axis)
    if shifts.ndim > 1 or (shifts.ndim and shifts.size not in (1, len(axes)) and len(axes) != 1):
        raise OptionError(f"roll: found shifts {shift} for axes {axis}, expected one for each")
    for each, number in zip(*np.broadcast_arrays(axes, shifts), strict=True):
        value = _rolled(value, int(number), normalize_axis("roll", each, value.ndim))
    return value


def _rolled(x: Value, shift: int, axis: int) -> Value:
    length = x.shape[axis]
    first = -shift % length if length else 0
    if first == 0:
        return x
    return concatenate([_part(x, axis, first, length), _part(x, axis, 0, first)], axis)
