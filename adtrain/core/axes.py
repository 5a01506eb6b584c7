"""Axes: how the axes of an operation's results relate to those of its arguments.

A label marks axes that move together: a result with the label, at index i, is the same function of the arguments at
index i. So `matmul` is "mk,kn->mn": row m of the result is a function of row m of the first argument, and of all of the
second. A label of arguments alone is added: the result is the sum over its indices, as over k. A label of results alone
repeats them. An axis without a label is used in any other way, as that of a softmax.

From this relation passes read whether an operation works row by row, item by item, by column, by pair or by member.
Most rules of `vmap` follow from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from adtrain.core.types import Shape

Labels: TypeAlias = tuple[str, ...]
"""For each axis of a value its label, a character; "" for an axis without one. A reshape also joins and divides axes:
one that has the indices of several, in row-major order, has their labels, in that order."""

KNOWN = 4096
"""The most relations of one kind that are kept: a network repeats layers, and so equations of equal shapes."""


@dataclass(frozen=True)
class Axes:
    """How the axes of results relate to those of arguments.

    Attributes:
        arguments: the labels of each argument.
        results: the labels of each result.
        added: labels of arguments over which the results are sums.
        leading: all values may have more leading axes, which move together. Parameters ``axis`` and ``axes`` count from
            the first one, or, if negative, from the last axis.
    """

    arguments: tuple[Labels, ...]
    results: tuple[Labels, ...]
    added: frozenset[str] = frozenset()
    leading: bool = False

    def follow(self, argument: int, axis: int) -> list[int | None]:
        """For each result the axis that moves with an axis of an argument; None where there is none."""
        label = self.arguments[argument][axis]
        return [labels.index(label) if label and label in labels else None for labels in self.results]

    def with_leading(self) -> Axes:
        """The same with one more leading axis of each value, which move together."""
        used = {label for labels in (*self.arguments, *self.results) for label in "".join(labels)}
        new = next(letter for letter in letters(len(used) + 1) if letter not in used)
        arguments, results = (tuple((new, *x) for x in xs) for xs in (self.arguments, self.results))
        return replace(self, arguments=arguments, results=results)

    def undivided(self) -> Axes:
        """The same without the labels of joined axes."""
        divided = {part for x in (*self.arguments, *self.results) for label in x if len(label) > 1 for part in label}
        if not divided:
            return self
        arguments, results = (
            tuple(tuple("" if divided.issuperset(label) else label for label in labels) for labels in side)
            for side in (self.arguments, self.results)
        )
        return replace(self, arguments=arguments, results=results)

    def renamed(self) -> Axes:
        """The same with labels in the order in which they occur, so that equal relations are equal."""
        used = dict.fromkeys(label for labels in (*self.arguments, *self.results) for label in "".join(labels))
        names = str.maketrans(dict(zip(used, letters(len(used)), strict=True)))
        arguments, results = (
            tuple(tuple(label.translate(names) for label in labels) for labels in side)
            for side in (self.arguments, self.results)
        )
        added = frozenset(label.translate(names) for label in self.added)
        return replace(self, arguments=arguments, results=results, added=added)


@dataclass(frozen=True)
class Items:
    """How an operation works item by item. An item is the elements at one index of axis 0.

    Attributes:
        count: the number of items.
        flags: for each argument True if item n of the results, or of what is summed, needs item n of it; False if it
            may need all of it.
    """

    count: int
    flags: tuple[bool, ...]


def items(axes: Axes, arguments: Sequence[Shape], results: Sequence[Shape]) -> Items | None:
    """How an operation on values of these shapes works item by item; None if it does not."""
    firsts = {labels[:1] for labels in axes.results}
    if len(firsts) > 1 or firsts <= {(), ("",)}:
        return None
    (first,) = firsts
    flags = tuple(labels[:1] == first for labels in axes.arguments)
    elsewhere = any(first[0] in "".join(x) for x, flag in zip(axes.arguments, flags, strict=True) if not flag)
    return None if elsewhere else Items(results[0][0], flags)


def outer_items(axes: Axes, arguments: Sequence[Shape], results: Sequence[Shape]) -> Items | None:
    """As `items`, but if axis 0 of a value joins several axes, an item is an index of the first of them.

    So a reshape between sequences (B, S, F) and rows (B S, F) has B items: S of these rows are one item.
    """
    given, made = (
        tuple((*(x[:1] for x in labels[:1]), *labels[1:]) for labels in side) for side in (axes.arguments, axes.results)
    )
    found = items(replace(axes, arguments=given, results=made), arguments, results)
    if found is None:
        return None
    read = (shape for shape, flag in zip(arguments, found.flags, strict=True) if flag)
    return replace(found, count=min(shape[0] for shape in (*read, *results)))


def summed_items(axes: Axes, arguments: Sequence[Shape]) -> Items | None:
    """How an operation sums over items, the indices of axis 0 of some arguments; None if it does not."""
    for labels, shape in zip(axes.arguments, arguments, strict=True):
        if labels and labels[0] in axes.added:
            return Items(shape[0], tuple(x[:1] == labels[:1] for x in axes.arguments))
    return None


def rows(axes: Axes, arguments: Sequence[Shape], results: Sequence[Shape], count: int) -> Items | None:
    """As `items`, but an item is one of ``count`` rows: an index of the first axes, which have ``count`` elements.

    So an operation on sequences (B, S, F), or a reshape of them to a matrix, works by B x S rows of F elements.
    """
    leading = {_leading(labels, shape, count) for labels, shape in zip(axes.results, results, strict=True)}
    if len(leading) > 1 or leading <= {"", None}:
        return None
    flags = (_leading(x, shape, count) in leading for x, shape in zip(axes.arguments, arguments, strict=True))
    return Items(count, tuple(flags))


def rows_along(axes: Axes, arguments: Sequence[Shape]) -> int | None:
    """By how many rows an operation along the last axes of its first argument works, such as a softmax, or a sum.

    So the row of a sum over the last two axes of an array (A, B, M, N) has M x N elements, and there are A x B rows.
    None if it also uses other axes that way, or no axis.
    """
    labels, shape = axes.arguments[0], arguments[0]
    kept = {label for x in axes.results for label in x if label}
    first = next((i for i, label in enumerate(labels) if label not in kept), len(labels))
    rest = {label for label, n in zip(labels[first:], shape[first:], strict=True) if n != 1}
    return math.prod(shape[:first]) if first and rest and rest.isdisjoint(kept) else None


def _leading(labels: Labels, shape: Shape, count: int) -> str | None:
    """The labels of the first axes that have ``count`` elements; None if there are none, or one has no label."""
    found = row_axes(shape, count)
    if found is None or any(n != 1 and not label for n, label in zip(shape[:found], labels, strict=False)):
        return None
    return "".join(labels[:found])


def row_axes(shape: Shape, count: int) -> int | None:
    """The number of the first axes that have ``count`` elements; None if there is no such number."""
    return next((axes for axes in range(1, len(shape) + 1) if math.prod(shape[:axes]) == count), None)


def letters(count: int) -> Labels:
    """``count`` different labels."""
    return tuple(chr(ord("a") + i) for i in range(count))


@lru_cache(KNOWN)
def parsed(text: str, arguments: tuple[int, ...], results: tuple[int, ...]) -> Axes | None:
    """The relation that a text such as "*mk,kn->*mn" says, for arguments and results with these numbers of axes.

    A small letter is a label, "." an axis without one. "*" stands for all other axes, which have labels of their own,
    counted from the last one. None: the text does not fit.
    """
    sides = [part.split(",") if part else [] for part in text.split("->")]
    if [len(side) for side in sides] != [len(arguments), len(results)]:
        return None
    counts = (*arguments, *results)
    values = [_expanded(part, n) for part, n in zip((*sides[0], *sides[1]), counts, strict=True)]
    found = [x for x in values if x is not None]
    if len(found) < len(values):
        return None
    given, made = tuple(found[: len(arguments)]), tuple(found[len(arguments) :])
    added = frozenset(label for x in given for label in x) - {label for x in made for label in x} - {""}
    return Axes(given, made, added, leading=all(part.startswith("*") for side in sides for part in side))


def _expanded(text: str, count: int) -> Labels | None:
    before, star, after = text.partition("*")
    others = count - len(before) - len(after)
    if others < 0 or (others and not star) or not re.fullmatch("[a-z.]*", before + after):
        return None
    middle = [chr(ord("A") + i) for i in reversed(range(others))]
    labels = tuple("" if letter == "." else letter for letter in (*before, *middle, *after))
    named = [label for label in labels if label]
    return labels if len(set(named)) == len(named) else None


@lru_cache(KNOWN)
def aligned(arguments: tuple[Shape, ...], results: tuple[Shape, ...]) -> Axes:
    """The axes of an elementwise operation or broadcast: equal ones move together, counted from the last one."""
    ndim = max(map(len, results))
    lengths = dict(enumerate(next(shape for shape in results if len(shape) == ndim)))
    names = letters(ndim)

    def labels(shape: Shape) -> Labels:
        first = ndim - len(shape)
        return tuple(names[first + i] if n == lengths[first + i] else "" for i, n in enumerate(shape))

    return Axes(tuple(map(labels, arguments)), tuple(map(labels, results)))


def along(ndim: int, used: Collection[int], arguments: int = 1, results: int = 1) -> Axes:
    """The axes of an operation along ``used`` of values of ``ndim`` axes: all other axes move together."""
    labels = tuple("" if i in used else label for i, label in enumerate(letters(ndim)))
    return Axes((labels,) * arguments, (labels,) * results, leading=True)


def without(ndim: int, used: Collection[int], added: bool = False) -> Axes:
    """The axes of an operation whose result lacks the axes ``used`` of its argument. ``added``: it sums over them."""
    names = letters(ndim)
    kept = tuple(label for i, label in enumerate(names) if i not in used)
    if added:
        return Axes((names,), (kept,), frozenset(names[i] for i in used), leading=True)
    return Axes(along(ndim, used).arguments, (kept,), leading=True)


def reshaped(source: Shape, shape: Shape) -> Axes:
    """The axes of a reshape: equal ones move together. An axis may also have the indices of several neighbours."""
    if 0 in source:
        return whole([len(source)], [len(shape)])
    names = iter(letters(len(source) + len(shape)))
    x, y = [""] * len(source), [""] * len(shape)
    i = j = 0
    while i < len(source) and j < len(shape):
        if (source[i] == 1) != (shape[j] == 1):  # an axis of length 1 that only one of them has
            i, j = i + (source[i] == 1), j + (shape[j] == 1)
            continue
        first, second = _equally_many(source[i:], shape[j:])
        if first == second == 1:
            x[i] = y[j] = next(names)
        elif first == 1 or second == 1:
            parts, at, lengths = (y, j, shape[j : j + second]) if first == 1 else (x, i, source[i : i + first])
            parts[at : at + len(lengths)] = ["" if n == 1 else next(names) for n in lengths]
            joined = "".join(parts[at : at + len(lengths)])
            if first == 1:
                x[i] = joined
            else:
                y[j] = joined
        i, j = i + first, j + second
    return Axes((tuple(x),), (tuple(y),))


def _equally_many(source: Shape, shape: Shape) -> tuple[int, int]:
    """The least numbers of first axes of two shapes with equally many elements. The shapes have equally many, not 0."""
    first = second = 1
    m, n = source[0], shape[0]
    while m != n:
        if m < n:
            first, m = first + 1, m * source[first]
        else:
            second, n = second + 1, n * shape[second]
    return first, second


def whole(arguments: Sequence[int], results: Sequence[int]) -> Axes:
    """The axes of an operation of which no two move together. The arguments are the numbers of axes of each value."""
    return Axes(tuple(("",) * n for n in arguments), tuple(("",) * n for n in results))
