"""The cells of a CSV table as numbers: values, and codes of categories."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from adtrain.data.columns import Column, printable, quoted
from adtrain.data.errors import DataError

MAX_CATEGORIES = 1000
"""The maximum number of categories of a column. Each becomes a feature."""

NUMBER_LIKE = re.compile(r"\W*\d|[+-]?(nan|inf(inity)?)$", re.IGNORECASE)
"""Texts that could be numbers, also in notations that are not read, such as 1,5: by default they are not categories."""


class CellReader:
    """Converts the cells of a table's columns with features, chunk by chunk.

    With `learning`, a column whose `categories` are None becomes one of categories if its first cells look like texts;
    otherwise it has numbers. An empty cell is an error unless `allow_empty`.
    """

    def __init__(self, path: Path, columns: Sequence[Column], learning: bool, allow_empty: bool) -> None:
        self._readers = [_ColumnReader(path, column, learning, allow_empty) for column in columns]

    def convert(self, lines: Sequence[int], rows: Sequence[Sequence[str]]) -> np.ndarray:
        """The cells of these rows as float64 (rows, columns): NaN for an empty cell.

        `lines` are the rows' positions in the file, for messages. Raises DataError with line and column.
        """
        if all(map(is_plain, map("".join, rows))) and not any(reader.has_categories for reader in self._readers):
            with suppress(ValueError), np.errstate(over="ignore"):
                numbers = np.array(rows, np.float64)
                if np.isfinite(numbers.astype(np.float32)).all():
                    for reader in self._readers:
                        reader.has_numbers = True
                    return numbers
        cells = zip(*rows, strict=True)
        return np.stack([x.convert(lines, texts) for x, texts in zip(self._readers, cells, strict=True)], axis=1)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns with all their categories; the code of a category is its index."""
        return tuple(reader.column for reader in self._readers)


class _ColumnReader:
    """Converts the cells of one column."""

    def __init__(self, path: Path, column: Column, learning: bool, allow_empty: bool) -> None:
        self.path, self._column, self.learning, self.allow_empty = path, column, learning, allow_empty
        self.has_categories = column.categories is not None
        self.has_numbers = not self.has_categories and not learning
        self.listed = self.has_categories or not learning
        self.codes = {text: i for i, text in enumerate(column.categories or ())}

    @property
    def column(self) -> Column:
        return replace(self._column, categories=tuple(self.codes) if self.has_categories else None)

    def convert(self, lines: Sequence[int], cells: Sequence[str]) -> np.ndarray:
        texts = [cell.strip(string.whitespace) for cell in cells]
        filled = [text for text in texts if text]
        if len(filled) < len(texts) and not self.allow_empty:
            expected = "expected a value; data.missing: mean, zero or drop allows empty cells"
            raise self._error(lines[texts.index("")], f"found an empty cell in {self._name}, {expected}")
        if filled and not (self.has_numbers or self.has_categories):
            self.has_numbers = any(map(NUMBER_LIKE.match, filled))
            self.has_categories = not self.has_numbers
        return self._codes(lines, texts) if self.has_categories else self._numbers(lines, texts)

    def _codes(self, lines: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        for line, text in zip(lines, texts, strict=True):
            if text and not self.listed and NUMBER_LIKE.match(text):
                expected = f"expected a category such as {quoted(next(iter(self.codes)))}"
                raise self._wrong(line, text, f"{expected}; list the column in data.categories")
            if text and self.codes.setdefault(text, len(self.codes)) == MAX_CATEGORIES and self.learning:
                expected = f"expected at most {MAX_CATEGORIES:,} categories; data.drop leaves out a column"
                raise self._wrong(line, text, expected)
        return np.array([self.codes[text] if text else np.nan for text in texts], np.float64)

    def _numbers(self, lines: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        if is_plain("".join(texts)):
            with suppress(ValueError), np.errstate(over="ignore"):
                numbers = np.array([text or "nan" for text in texts], np.float64)
                if np.isfinite(numbers.astype(np.float32)).sum() == sum(map(bool, texts)):
                    return numbers
        for line, text in zip(lines, texts, strict=True):
            if text and not (is_plain(text) and is_finite(text)):
                advice = "; if the column has categories, list it in data.categories" if self.learning else ""
                raise self._wrong(line, text, f"expected a finite number{advice}")
        raise AssertionError(f"{self.path}: NumPy cannot convert cells that are all finite numbers or empty")

    @property
    def _name(self) -> str:
        return column_title(self._column.position, self._column.name)

    def _wrong(self, line: int, text: str, expected: str) -> DataError:
        return self._error(line, f"found {quoted(text)} in {self._name}, {expected}")

    def _error(self, line: int, message: str) -> DataError:
        return DataError(f"{self.path}:{line}: {message}")


def column_title(position: int, name: str | None) -> str:
    """The column for messages, such as `column 1 (width)`."""
    return f"column {position}" if name is None else f"column {position} ({printable(name)})"


def is_number(text: str) -> bool:
    """Whether Python reads the text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_plain(text: str) -> bool:
    """False for digits of other scripts and groups such as 1_000, which Python reads as numbers."""
    return text.isascii() and "_" not in text


def is_finite(text: str) -> bool:
    """Whether the text is a number that is finite in float32."""
    with np.errstate(over="ignore"):
        return is_number(text) and bool(np.isfinite(np.float32(float(text))))
