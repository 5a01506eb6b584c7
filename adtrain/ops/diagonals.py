"""Diagonals and triangles of matrices: diagonal, diag, trace, tril and triu."""

from __future__ import annotations

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.core.trace import bind
from adtrain.ops.broadcasting import reshape
from adtrain.ops.common import ArrayLike, as_value, normalize_axis
from adtrain.ops.compare import where
from adtrain.ops.reduce import sum
from adtrain.ops.shape import pad_p, slice, transpose


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


def diag(x: ArrayLike, k: int = 0) -> Value:
    """As `numpy.diag`: of a vector the matrix with it on diagonal ``k``, of a matrix its diagonal ``k``.

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


def trace(x: ArrayLike, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Value:
    """The sum of a diagonal, as `numpy.trace`; integers are summed as int64.

    Raises:
        ShapeError: there are fewer than two axes, an axis is out of range, or both are the same.
    """
    return sum(_diagonal("trace", x, offset, axis1, axis2), -1)


def tril(x: ArrayLike, k: int = 0) -> Value:
    """The elements of the last two axes on diagonal ``k`` and below it, and 0 above it, as `numpy.tril`.

    Raises:
        ShapeError: there are fewer than two axes.
    """
    return _triangle("tril", x, k, below=True)


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
