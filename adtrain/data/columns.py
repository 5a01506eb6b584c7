"""The columns of a table, as a reader finds them and as a run stores them."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column with features.

    Attributes:
        name: None if the table has no header.
        position: its index in the file, from 0.
        categories: the texts of a column of categories; None for a column of numbers.
    """

    name: str | None
    position: int
    categories: tuple[str, ...] | None = None

    @property
    def title(self) -> str:
        """The name, or the position if there is no name."""
        return str(self.position) if self.name is None else self.name


@dataclass(frozen=True)
class Columns:
    """The columns with features, in their order, and `width`, the number of all columns of the file."""

    features: tuple[Column, ...]
    width: int


BLANKS = {0xA0: " ", 0x2007: " ", 0x202F: " ", 0x200B: None, 0xFEFF: None}
"""No-break spaces, which are read as spaces, and characters without width, which are left out."""


def cleaned(text: str) -> str:
    """A name or cell as it is compared with others: without blanks around it, and with composed letters (NFC)."""
    if text.isascii():
        return text.strip()
    return unicodedata.normalize("NFC", text.translate(BLANKS)).strip()


def quoted(text: str) -> str:
    """A text from a file for messages, shortened to 40 characters."""
    return repr(text[:40])


def printable(name: str) -> str:
    """A name from a file for messages; quoted if it is long or has control characters."""
    return name if name.isprintable() and len(name) <= 40 else quoted(name)
