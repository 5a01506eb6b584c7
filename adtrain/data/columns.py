"""The columns of a table, as a reader finds them and as a run stores them."""

from __future__ import annotations

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


def quoted(text: str) -> str:
    """A text from a file for messages, shortened to 40 characters."""
    return repr(text[:40])


def printable(name: str) -> str:
    """A name from a file for messages; quoted if it is long or has control characters."""
    return name if name.isprintable() and len(name) <= 40 else quoted(name)
