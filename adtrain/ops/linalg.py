"""Norms of vectors and matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.ops.broadcasting import floating, keep_axes, reshape
from adtrain.ops.common import ArrayLike, Axis, as_value, normalize_axis
from adtrain.ops.compare import equal, not_equal, where
from adtrain.ops.elementwise import abs, astype, sqrt
from adtrain.ops.power import power
from adtrain.ops.reduce import max, min, sum


def norm(x: ArrayLike, ord: float | str | None = None, axis: Axis = None, keepdims: bool = False) -> Value:
    """Norm of vectors or matrices, as `numpy.linalg.norm`; integers as float32. Where it is 0, its gradient is 0.

    Args:
        ord: of vectors a number p, for (sum of |x|^p)^(1/p), where inf is the largest and -inf the smallest |x|, and 0
            counts the elements other than 0; None is 2. Of matrices None or "fro", the root of the sum of squares; 1
            and -1, the largest and smallest sum of |x| of a column; inf and -inf, the same of a row.
        axis: one axis for vectors, two for matrices. None: all axes if ``ord`` is None, else those of a vector or
            matrix ``x``.

    Raises:
        ShapeError: an axis is out of range, there are more than two, or there is no largest or smallest element.
        OptionError: there is no such ``ord``, or it needs singular values, which adtrain does not compute.
    """
    value = floating(as_value(x))
    if axis is None:
        axes = list(range(value.ndim))
    else:
        axes = [normalize_axis("norm", i, value.ndim) for i in (axis if isinstance(axis, Sequence) else [axis])]
    if axis is None and ord is None:
        out = _euclidean(value, axes)
    elif len(axes) == 1:
        out = _vector_norm(value, 2 if ord is None else ord, axes[0])
    elif len({*axes}) == len(axes) == 2:
        out = _matrix_norm(value, ord, *axes)
    else:
        raise ShapeError(f"norm: found axes {tuple(axes)} of shape {value.shape}, expected one axis or two")
    return reshape(out, keep_axes(value.shape, axes)) if keepdims else out


def _euclidean(x: Value, axes: Sequence[int]) -> Value:
    squares = sum(x * x, axes)
    zero = equal(squares, 0.0)
    return where(zero, 0.0, sqrt(where(zero, 1.0, squares)))


def _vector_norm(x: Value, ord: float | str, axis: int) -> Value:
    if isinstance(ord, str):
        raise OptionError(f"norm: found ord {ord!r} for vectors, expected a number")
    if ord == 2:
        return _euclidean(x, [axis])
    if ord == 0:
        return astype(sum(not_equal(x, 0.0), axis), x.dtype)
    sizes = abs(x)
    if ord == 1:
        return sum(sizes, axis)
    if math.isinf(ord):
        return max(sizes, axis) if ord > 0 else min(sizes, axis)
    absent = equal(x, 0.0)  # there the derivative of a power below 1 is infinite
    powers = where(absent, 0.0 if ord > 0 else math.inf, power(where(absent, 1.0, sizes), float(ord)))
    powers = sum(powers, axis)
    zero = equal(powers, 0.0)
    return where(zero, 0.0, power(where(zero, 1.0, powers), 1 / ord))


def _matrix_norm(x: Value, ord: float | str | None, rows: int, columns: int) -> Value:
    if ord is None or ord == "fro":
        return _euclidean(x, sorted((rows, columns)))
    if ord in ("nuc", 2, -2):
        raise OptionError(f"norm: ord {ord!r} of matrices needs singular values, which adtrain does not compute")
    if isinstance(ord, str) or ord not in (1, -1, math.inf, -math.inf):
        raise OptionError(f"norm: found ord {ord!r} for matrices, expected None, 'fro', 1, -1, inf or -inf")
    summed, left = (rows, columns) if ord in (1, -1) else (columns, rows)
    sums = sum(abs(x), summed)
    return (max if ord > 0 else min)(sums, left - (left > summed))
