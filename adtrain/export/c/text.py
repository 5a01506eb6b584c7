"""Comments, strings and numbers as C text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from textwrap import TextWrapper

import numpy as np

from adtrain.codegen.expressions import literal

WIDTH = 110
"""Columns of a line of numbers, or of a statement."""

_WRAPPER = TextWrapper(
    WIDTH, initial_indent="    ", subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
)


def number(x: np.generic) -> str:
    """A number; of floats the shortest decimal number that is read as the same float."""
    return f"{x!s}f" if x.dtype == np.float32 and isfinite(x) else literal(x.item())


def numbers(x: np.ndarray) -> Iterator[str]:
    """The elements of an array as lines; see `number`."""
    line = "   "
    for element in x.reshape(-1):
        item = f" {number(element)},"
        if len(line) + len(item) > WIDTH:
            yield line
            line = "   "
        line += item
    yield line


def statement(text: str) -> str:
    """A statement in the body of a function, in lines of at most WIDTH columns."""
    joined = text.replace(" = ", "\0=\0").replace(" + ", "\0+\0")  # no line ends within an initialiser or a sum
    return _WRAPPER.fill(joined).replace("\0", " ")


def comment(lines: Sequence[str]) -> list[str]:
    first, *others = lines
    return [f"/* {first}", *(f"   {line}".rstrip() for line in others[:-1]), f"   {others[-1]} */"]


def c_string(text: str) -> str:
    """A C string with the UTF-8 bytes of a text; others than letters, digits and some signs are octal numbers."""
    plain = (32, *range(44, 60), *range(64, 92), 95, *range(97, 123), 40, 41)
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'
