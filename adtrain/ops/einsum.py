"""Sums of products by the names of axes, made of transpose, reshape, matmul and multiplication."""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.ops.broadcasting import promote, reshape
from adtrain.ops.common import ArrayLike
from adtrain.ops.diagonals import diagonal
from adtrain.ops.elementwise import astype
from adtrain.ops.matmul import matmul
from adtrain.ops.reduce import sum
from adtrain.ops.shape import transpose

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
    method = "optimal" if len(terms) <= SEARCHED else "greedy"  # the time of the former grows exponentially
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
