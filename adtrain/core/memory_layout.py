"""The layout of a kernel's memory: one value gives Python its size, and CUDA pointers to its arrays.

A kernel takes the pointers from macros, so a length that only one side changes cannot move an array of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True)
class Text:
    """The C text of an integer that is known when the kernel runs. Arithmetic on it gives longer text."""

    text: str

    def __add__(self, other: Length) -> Text:
        return self if other == 0 else Text(f"({self.text} + {_text(other)})")

    def __radd__(self, other: int) -> Text:
        return self + other

    def __mul__(self, other: Length) -> Text:
        return self if other == 1 else Text("0" if other == 0 else f"({self.text} * {_text(other)})")

    def __rmul__(self, other: int) -> Text:
        return self * other

    def __floordiv__(self, other: int) -> Text:
        return self if other == 1 else Text(f"({self.text} / {other})")


Length: TypeAlias = "int | Text"
"""A length that Python computes with, and the same length in the text of a kernel. It is not negative."""


def rounded_up(length: Length, multiple: int) -> Length:
    return (length + (multiple - 1)) // multiple * multiple


@dataclass(frozen=True)
class Array:
    """An array of a layout: its name, the bytes of an element, and how many there are."""

    name: str
    itemsize: int
    count: Length = 1


class Union(NamedTuple):
    """Groups of arrays of which the kernel uses one, so that they have the same memory. Nothing comes after them."""

    groups: Sequence[Sequence[Array]]


Arrays: TypeAlias = "Sequence[Array | Union]"

ALIGNED = 16
"""The alignment of dynamic shared memory and of scratch."""


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


def memory_layout(name: str, arrays: Callable[..., Arrays], alignment: int = 1, **lengths: int) -> MemoryLayout:
    """The layout in which arrays lie one after another.

    Args:
        name: the names of the macros begin with it.
        arrays: returns the arrays for lengths by these names.
        alignment: of the first array. If the memory itself has less, the kernel begins at the first multiple of it, for
            which the size has so many more bytes.
        lengths: arguments of the kernel, and what it computes from them. All other lengths are constants.
    """
    size = _size(arrays(**lengths)) + (alignment if alignment > ALIGNED else 0)
    parameters = ", ".join(["E", "memory", *lengths])
    in_kernel = arrays(**{length: Text(f"({length})") for length in lengths})
    macros = [f"{name}_{x.name}({parameters}) array_at<E, {x.itemsize}>({at})" for x, at in _places(in_kernel)]
    return MemoryLayout(size, "".join(f"#define {macro}\n" for macro in macros))


def _size(arrays: Arrays) -> int:
    total = 0
    for x in arrays:
        if isinstance(x, Union):
            total += max(map(_size, x.groups))
        else:
            assert isinstance(x.count, int)
            total += x.itemsize * x.count
    return total


def _places(arrays: Arrays, at: str = "memory") -> Iterator[tuple[Array, str]]:
    """Each array and the C text of a pointer to its first byte, if the first array begins at the pointer `at`."""
    for x in arrays:
        if isinstance(x, Union):
            for group in x.groups:
                yield from _places(group, at)
        else:
            yield x, at
            if (count := _text(x.count)) != "0":
                at = f"array_end<{x.itemsize}>({at}, {count})"


def _text(length: Length) -> str:
    return length.text if isinstance(length, Text) else str(length)
