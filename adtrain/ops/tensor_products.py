"""Products of tensors, made of matmul and multiplication: tensordot, kron and cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.ops.broadcasting import broadcast_to, promote, reshape
from adtrain.ops.common import ArrayLike, broadcast_shapes, normalize_axis
from adtrain.ops.index import take
from adtrain.ops.matmul import matmul
from adtrain.ops.shape import transpose


def tensordot(a: ArrayLike, b: ArrayLike, axes: int | Sequence[Any] = 2) -> Value:
    """Products summed over pairs of axes, as `numpy.tensordot`, by one matrix product.

    Args:
        axes: a pair of sequences: axis ``axes[0][i]`` of ``a`` and axis ``axes[1][i]`` of ``b`` are summed together; an
            axis alone is a sequence of one. Or an integer n: the last n axes of ``a`` and the first n of ``b``.

    Returns:
        The remaining axes of ``a``, then those of ``b``.

    Raises:
        ShapeError: lengths differ in a pair, or an axis is named twice or out of range.
        OptionError: ``axes`` is of another form.
    """
    a, b = promote(a, b)
    over_a, over_b = _paired_axes(axes, a, b)
    for i, j in zip(over_a, over_b, strict=True):
        if a.shape[i] != b.shape[j]:
            raise ShapeError(
                f"tensordot: lengths {a.shape[i]} and {b.shape[j]} differ, "
                f"of axis {i} of {a.shape} and axis {j} of {b.shape}"
            )
    rest_a = [i for i in range(a.ndim) if i not in over_a]
    rest_b = [j for j in range(b.ndim) if j not in over_b]
    lengths = [a.shape[i] for i in rest_a], [b.shape[j] for j in rest_b]
    summed = math.prod(a.shape[i] for i in over_a)
    rows = reshape(transpose(a, (*rest_a, *over_a)), (math.prod(lengths[0]), summed))
    columns = reshape(transpose(b, (*over_b, *rest_b)), (summed, math.prod(lengths[1])))
    return reshape(matmul(rows, columns), (*lengths[0], *lengths[1]))


def _paired_axes(axes: int | Sequence[Any], a: Value, b: Value) -> tuple[list[int], list[int]]:
    """The summed axes of ``a`` and of ``b``, as non-negative numbers."""
    if isinstance(axes, (int, np.integer)):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise ShapeError(
                f"tensordot: found {axes} axes for shapes {a.shape} and {b.shape}, expected 0 to {min(a.ndim, b.ndim)}"
            )
        return list(range(a.ndim - int(axes), a.ndim)), list(range(int(axes)))
    given = [[x] if isinstance(x, (int, np.integer)) else list(x) for x in axes]
    if len(given) != 2 or len(given[0]) != len(given[1]):
        raise OptionError(f"tensordot: found axes {axes}, expected a number, or two sequences of equal length")
    first, second = (
        [normalize_axis("tensordot", int(i), x.ndim) for i in found] for found, x in zip(given, (a, b), strict=True)
    )
    if len({*first}) < len(first) or len({*second}) < len(second):
        raise ShapeError(f"tensordot: axes {axes} name an axis twice")
    return first, second


def kron(a: ArrayLike, b: ArrayLike) -> Value:
    """Kronecker product, as `numpy.kron`: ``b`` times each element of ``a``, as blocks of a larger array.

    The array with fewer axes gets leading axes of length 1. The length of each axis is the product of both lengths.
    """
    a, b = promote(a, b)
    ndim = max(a.ndim, b.ndim)
    shape_a, shape_b = ((1,) * (ndim - x.ndim) + x.shape for x in (a, b))
    blocks = reshape(a, [n for length in shape_a for n in (length, 1)])
    block = reshape(b, [n for length in shape_b for n in (1, length)])
    return reshape(blocks * block, [m * n for m, n in zip(shape_a, shape_b, strict=True)])


def cross(a: ArrayLike, b: ArrayLike, axis: int = -1) -> Value:
    """Cross product of vectors of three numbers along ``axis``; the other axes are broadcast.

    Args:
        axis: an axis of the result; its length is 3 in both arrays.

    Raises:
        ShapeError: ``axis`` is not of length 3, or the shapes do not broadcast.
    """
    a, b = promote(a, b)
    shape = broadcast_shapes("cross", a.shape, b.shape)
    position = normalize_axis("cross", axis, len(shape))
    after = len(shape) - position  # axis -after is the same axis in both arrays
    if any(x.ndim < after or x.shape[-after] != 3 for x in (a, b)):
        raise ShapeError(f"cross: axis {axis} of shapes {a.shape} and {b.shape} is not of length 3 in both")
    a, b = broadcast_to(a, shape), broadcast_to(b, shape)
    return _rotated(a * _rotated(b, position) - _rotated(a, position) * b, position)


def _rotated(x: Value, axis: int) -> Value:
    """The three elements along ``axis`` in the order 1, 2, 0."""
    return take(x, np.array([1, 2, 0]), axis)
