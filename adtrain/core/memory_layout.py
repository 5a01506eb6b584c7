"""The layout of a kernel's memory: one value gives Python its size, and CUDA the size and the places of its arrays.

A kernel takes the places from macros, so a length that only one side changes cannot move an array of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Text:
    """C text of an integer that is known when the kernel runs: a sum of terms, each with a constant factor.

    Args:
        terms: the factor of each term, which is C text. That of the constant term is "1".
    """

    def __init__(self, terms: Mapping[str, int]) -> None:
        self.terms = terms

    def __str__(self) -> str:
        return f"({_sum(self)})"

    def __add__(self, other: Length) -> Text:
        others = other.terms if isinstance(other, Text) else {"1": other}
        return Text({term: self.terms.get(term, 0) + others.get(term, 0) for term in {**self.terms, **others}})

    def __radd__(self, other: int) -> Text:
        return self + other

    def __mul__(self, other: Length) -> Text:
        if isinstance(other, Text):
            return Text({f"{self} * {other}": 1})
        return Text({term: n * other for term, n in self.terms.items()})

    def __rmul__(self, other: int) -> Text:
        return self * other

    def __floordiv__(self, other: int) -> Text:
        if all(n % other == 0 for n in self.terms.values()):
            return Text({term: n // other for term, n in self.terms.items()})
        return Text({f"{self} / {other}": 1})


Length: TypeAlias = "int | Text"
"""A length that Python computes with, and the same length in the text of a kernel. It is not negative."""


def ceil_div(length: Length, divisor: int) -> Length:
    """How many groups of `divisor` elements there are, the last of which may be smaller."""
    return (length + (divisor - 1)) // divisor


def rounded_up(length: Length, multiple: int) -> Length:
    rounded = ceil_div(length, multiple) * multiple
    return Text({str(rounded): 1}) if isinstance(rounded, Text) and multiple > 1 else rounded  # one term


@dataclass(frozen=True)
class Array:
    """An array of a layout: its name, the bytes of an element, how many there are, and its alignment in bytes."""

    name: str
    itemsize: int
    count: Length = 1
    alignment: int = 1


class Union(NamedTuple):
    """Groups of arrays of which the kernel uses one at a time, so that they have the same memory."""

    groups: Sequence[Sequence[Array]]


class MemoryLayout(NamedTuple):
    """The layout of a kernel's shared memory or scratch.

    Attributes:
        size: bytes.
        macros: the text of the macros. For a layout SCRATCH with an array SUMS of as many elements as an argument
            `rows` says, ``SCRATCH_SUMS(float, scratch, rows)`` points to the array. A float must have as many bytes as
            an element.
    """

    size: int
    macros: str


def memory_layout(
    name: str, arrays: Callable[..., Sequence[Array | Union]], alignment: int = 1, **lengths: int
) -> MemoryLayout:
    """The layout in which arrays lie one after another.

    Args:
        name: the names of the macros begin with it.
        arrays: returns the arrays for lengths by these names.
        alignment: of the first array. If the memory itself has less, the kernel begins at the first multiple of it, for
            which the size has so many more bytes.
        lengths: arguments of the kernel, and what it computes from them. All other lengths are constants.
    """
    more = alignment if alignment > ALIGNED else 0
    size, _ = _placed(arrays(**lengths), 0)
    assert isinstance(size, int)
    _, places = _placed(arrays(**{length: Text({f"({length})": 1}) for length in lengths}), 0)
    parameters = ", ".join(["E", "memory", *lengths])
    macros = [f"#define {name}_{array.name}({parameters}) {_pointer(array, place)}\n" for array, place in places]
    return MemoryLayout(size + more, "".join(macros))


ALIGNED = 16
"""The alignment that dynamic shared memory and scratch have."""


def _pointer(array: Array, place: Length) -> str:
    elements, size = place // array.itemsize, array.itemsize
    if str(elements * size) == str(place):
        return f"(array_at<E, {size}>(memory) + {_sum(elements)})"
    return f"array_at<E, {size}>((memory) + {_sum(place)})"


def _placed(arrays: Sequence[Array | Union], at: Length) -> tuple[Length, list[tuple[Array, Length]]]:
    """Where the last array ends if the first one begins at `at`; and where each one begins."""
    found: list[tuple[Array, Length]] = []
    for array in arrays:
        if isinstance(array, Union):
            groups = [_placed(group, at) for group in array.groups]
            found += [place for _, places in groups for place in places]
            at = functools.reduce(_larger, (end for end, _ in groups))
        else:
            at = rounded_up(at, array.alignment)
            found.append((array, at))
            at = at + array.count * array.itemsize
    return at, found


def _sum(length: Length) -> str:
    """The text of a sum, without parentheses."""
    if isinstance(length, int):
        return str(length)
    terms = [(term, n) for term, n in length.terms.items() if n]
    return " + ".join(str(n) if term == "1" else term if n == 1 else f"{term} * {n}" for term, n in terms) or "0"


def _larger(a: Length, b: Length) -> Length:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return Text({f"({a} > {b} ? {a} : {b})": 1})
