"""The layout of a kernel's memory: one value gives Python the bytes, and CUDA pointers to the arrays.

A kernel takes the pointers from macros that Python writes. So both agree on the order and the lengths of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Length:
    """A length, not negative: its value for Python, and its C text for a kernel that other lengths also run."""

    value: int
    text: str

    def __add__(self, other: int | Length) -> Length:
        return Length(self.value + _length(other).value, f"({self.text} + {_length(other).text})")

    def __mul__(self, other: int | Length) -> Length:
        return Length(self.value * _length(other).value, f"({self.text} * {_length(other).text})")

    def __floordiv__(self, other: int) -> Length:
        return Length(self.value // other, f"({self.text} / {other})")

    def rounded_up(self, multiple: int) -> Length:
        return (self + (multiple - 1)) // multiple * multiple


Arrays: TypeAlias = Mapping[str, tuple[int, "int | Length"]]
"""For each array, by its name, the bytes of an element and the number of elements."""


def _length(x: int | Length) -> Length:
    return x if isinstance(x, Length) else Length(x, str(x))


def lengths(**values: int) -> list[Length]:
    """Lengths that are arguments of a layout's macros, by their names."""
    return [Length(value, f"({name})") for name, value in values.items()]


class MemoryLayout(int):
    """The bytes of a kernel's shared memory or scratch, with macros that point to its arrays."""

    macros = ""


def memory_layout(name: str, arrays: Arrays, *arguments: Length, alignment: int = 0) -> MemoryLayout:
    """The layout in which arrays lie one after another.

    For a layout SCRATCH with an array SUMS and an argument `rows`, ``SCRATCH_SUMS(float, scratch, rows)`` points to the
    array. The kernel does not compile if a float has another size than an element. No macro has the number of all
    bytes: it would make another source of each length, also where the kernel is the same.

    Args:
        arguments: the `lengths` that the kernel gives to the macros. All other lengths are constants.
        alignment: the macros round the pointer to the memory up to a multiple of it. The layout is longer by as many
            bytes.
    """
    layout = MemoryLayout(alignment + sum(size * _length(count).value for size, count in arrays.values()))
    parameters = ", ".join(["E", "memory", *(x.text.strip("()") for x in arguments)])
    at = f"array_aligned<{alignment}>(memory)" if alignment else "memory"
    for array, (size, count) in arrays.items():
        layout.macros += f"#define {name}_{array}({parameters}) array_at<E, {size}>({at})\n"
        at = f"array_end<{size}>({at}, {_length(count).text})"
    return layout
