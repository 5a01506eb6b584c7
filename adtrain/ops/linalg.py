"""Products of tensors, made of transpose, reshape, matmul and multiplication; norms of vectors and matrices."""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.ops.common import (
    ArrayLike,
    Axis,
    as_value,
    broadcast_shapes,
    broadcast_to,
    floating,
    keep_axes,
    normalize_axis,
    promote,
    reshape,
)
from adtrain.ops.compare import equal, not_equal, where
from adtrain.ops.elementwise import abs, astype, power, sqrt
from adtrain.ops.index import take
from adtrain.ops.matmul import matmul
from adtrain.ops.rearrange import diagonal
from adtrain.ops.reduce import sum
from adtrain.ops.shape import transpose

__all__ = ["cross", "einsum", "kron", "norm", "tensordot"]

SEARCHED = 4
"""Up to this number of operands the order of fewest operations is searched."""


@dataclass(frozen=True)
class _Term:
    """A value with one label, a letter, for each axis; no label occurs twice."""

    value: Value
    labels: str

    def length(self, label: str) -> int:
        return self.value.shape[self.labels.index(label)]

    def ordered(self, labels: str) -> Value:
        """The value with the axes in the order of ``labels``."""
        return transpose(self.value, [self.labels.index(label) for label in labels])

    def summed(self, kept: Collection[str]) -> _Term:
        """The sum over the axes whose labels are not in ``kept``."""
        axes = [i for i, label in enumerate(self.labels) if label not in kept]
        if not axes:
            return self
        total = sum(self.value, axes)
        return _Term(astype(total, self.value.dtype), "".join(x for x in self.labels if x in kept))


def einsum(subscripts: str, *operands: ArrayLike) -> Value:
    """Sum of products of elements, as `numpy.einsum`: ``einsum("ij,jk->ik", a, b)`` is ``a @ b``.

    The operands are multiplied two at a time, in the order that `numpy.einsum_path` chooses; each product with a sum is
    one matrix product. Of integers the result has the same type, and sums wrap around.

    Args:
        subscripts: letters for the axes of each operand, separated by commas, then ``->`` and those of the result. A
            letter that is not in the result is summed over. ``...`` stands for axes that are broadcast. A letter twice
            in an operand is a diagonal. Without ``->`` the result has the letters that occur once, in alphabetic order.

    Raises:
        ShapeError: the subscripts do not fit the shapes, or lengths of a letter differ (1 is broadcast).
        OptionError: the subscripts are wrong for all shapes.
        DTypeError: ``subscripts`` is not a string, or all operands are bool.
    """
    if not isinstance(subscripts, str):
        raise DTypeError(
            f"einsum: found subscripts of type {type(subscripts).__name__}, expected text first, as in "
            "einsum('ij,jk->ik', a, b)"
        )
    if not operands:
        raise OptionError("einsum: found no operands, expected at least one")
    values = promote(*operands)
    if values[0].dtype == np.bool_:
        raise DTypeError("einsum: found bool, expected numbers; use astype")
    inputs, output = _labels(subscripts, values)
    terms = [_without_repetition(value, labels) for value, labels in zip(values, inputs, strict=True)]
    terms = _without_broadcast_axes(terms)
    known = {label for term in terms for label in term.labels}
    if missing := [label for label in output if label not in known]:
        raise OptionError(f"einsum: axis {missing[0]!r} of the result is in no operand of {subscripts!r}")
    for positions in _order(terms, output):
        chosen = [terms[i] for i in positions]
        terms = [term for i, term in enumerate(terms) if i not in positions]
        for i, term in enumerate(chosen[1:], 1):
            kept = {*output}.union(*(other.labels for other in (*terms, *chosen[i + 1 :])))
            chosen[i] = _product(chosen[i - 1], term, kept)
        terms.append(chosen[-1])
    return terms[0].summed(output).ordered(output)


def _labels(subscripts: str, values: Sequence[Value]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, with letters instead of ``...``."""
    text = "".join(subscripts.split())
    left, arrow, result = text.partition("->")
    parts = left.split(",")
    if any(char not in string.ascii_letters for part in (*parts, result) for char in part.replace("...", "", 1)):
        raise OptionError(f"einsum: found subscripts {subscripts!r}, expected letters, '...', ',' and one '->'")
    if len(parts) != len(values):
        raise OptionError(f"einsum: {subscripts!r} has {len(parts)} operands, found {len(values)}")
    unused = [letter for letter in string.ascii_letters if letter not in text]
    counts = []
    for part, value in zip(parts, values, strict=True):
        named = len(part.replace("...", ""))
        counts.append(value.ndim - named if "..." in part else 0)
        if counts[-1] < 0 or ("..." not in part and value.ndim != named):
            raise ShapeError(f"einsum: {part!r} in {subscripts!r} does not fit shape {value.shape}")
    most = max(counts)
    if most > len(unused):
        raise ShapeError(f"einsum: found more than {len(string.ascii_letters)} axes for {subscripts!r}")
    others = "".join(unused[:most])
    inputs = [part.replace("...", others[most - n :]) for part, n in zip(parts, counts, strict=True)]
    if arrow:
        if most and "..." not in result:
            raise ShapeError(f"einsum: the result of {subscripts!r} has no '...', expected the axes that are broadcast")
        output = result.replace("...", others)
    else:
        output = others + "".join(sorted(x for x in {*left} - {*".,"} if left.count(x) == 1))
    if len({*output}) != len(output):
        raise OptionError(f"einsum: the result of {subscripts!r} has an axis twice")
    return inputs, output


def _without_repetition(value: Value, labels: str) -> _Term:
    """A term with the diagonal of the axes that have the same label."""
    for label in sorted({*labels}):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            if value.shape[first] != value.shape[second]:
                raise ShapeError(
                    f"einsum: axis {label!r} has lengths {value.shape[first]} and {value.shape[second]} in one operand"
                )
            value = diagonal(value, 0, first, second)
            labels = labels[:first] + labels[first + 1 : second] + labels[second + 1 :] + label
    return _Term(value, labels)


def _without_broadcast_axes(terms: Sequence[_Term]) -> list[_Term]:
    """The terms without axes of length 1 whose label has another length elsewhere."""
    lengths: dict[str, int] = {}
    for term in terms:
        for label, n in zip(term.labels, term.value.shape, strict=True):
            if lengths.setdefault(label, n) == 1:
                lengths[label] = n
            if n not in (1, lengths[label]):
                raise ShapeError(f"einsum: axis {label!r} has lengths {lengths[label]} and {n}")
    found = []
    for term in terms:
        kept = "".join(label for label in term.labels if term.length(label) == lengths[label])
        found.append(_Term(reshape(term.value, [lengths[label] for label in kept]), kept))
    return found


def _order(terms: Sequence[_Term], output: str) -> list[tuple[int, ...]]:
    """The positions of the terms of each product; its result is appended to the other terms."""
    if len(terms) < 3:
        return [tuple(range(len(terms)))]
    text = ",".join(term.labels for term in terms) + "->" + output
    shapes = [np.broadcast_to(np.float32(0), term.value.shape) for term in terms]
    method = "optimal" if len(terms) <= SEARCHED else "greedy"  # the time of "optimal" grows exponentially
    path: list[tuple[int, ...]] = np.einsum_path(text, *shapes, optimize=method)[0][1:]
    return path


def _product(a: _Term, b: _Term, kept: Collection[str]) -> _Term:
    """The product, summed over the axes whose labels are not in ``kept``."""
    a, b = a.summed({*kept, *b.labels}), b.summed({*kept, *a.labels})
    batch = "".join(x for x in a.labels if x in b.labels and x in kept)
    over = "".join(x for x in a.labels if x in b.labels and x not in kept)
    rows = "".join(x for x in a.labels if x not in b.labels)
    columns = "".join(x for x in b.labels if x not in a.labels)
    shape = [term.length(x) for term, labels in ((a, batch + rows), (b, columns)) for x in labels]
    if not over:
        left = reshape(a.ordered(batch + rows), [a.length(x) for x in batch + rows] + [1] * len(columns))
        right = reshape(
            b.ordered(batch + columns),
            [b.length(x) for x in batch] + [1] * len(rows) + [b.length(x) for x in columns],
        )
        return _Term(left * right, batch + rows + columns)
    # an operand that has its axes in the order of the transposed matrix stays as it is
    transpose_a = bool(rows) and a.labels == batch + over + rows
    transpose_b = not (bool(columns) and b.labels == batch + over + columns)
    left = _matrices(a, batch, *((over, rows) if transpose_a else (rows, over)))
    right = _matrices(b, batch, *((columns, over) if transpose_b else (over, columns)))
    return _Term(reshape(matmul(left, right, transpose_a, transpose_b), shape), batch + rows + columns)


def _matrices(term: _Term, *groups: str) -> Value:
    """The value with one axis for each group of labels; without a first axis if that group is empty."""
    lengths = [prod(term.length(label) for label in group) for group in groups]
    return reshape(term.ordered("".join(groups)), lengths if groups[0] else lengths[1:])


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
        return sizes.max(axis) if ord > 0 else sizes.min(axis)
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
    axis = left - (left > summed)
    return sums.max(axis) if ord > 0 else sums.min(axis)
