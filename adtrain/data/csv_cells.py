"""The cells of a CSV table as numbers: values, and codes of categories."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from adtrain.data.columns import Column, cleaned, printable, quoted
from adtrain.data.errors import DataError
from adtrain.data.options import Options
from adtrain.text import first_names, visible

_log = logging.getLogger(__name__)

FLOAT32_INFINITY = 2.0**128 - 2.0**103
"""From here on float32 rounds to infinity."""

LARGEST_INTEGER = 2.0**53
"""From here on float64 does not have all integers."""

MAX_CATEGORIES = 1000
"""The maximum number of categories of a column. Each becomes a feature."""

NUMBER_LIKE = re.compile(r"\W*\d|[+-]?inf(inity)?$", re.IGNORECASE)
"""Texts that could be numbers, also in notations that are not read, such as 1,5: by default they are not categories."""


class Missing:
    """The texts that stand for an empty cell; those that are numbers also in another notation, as -999 and -999.0."""

    def __init__(self, options: Options) -> None:
        self._texts = {"", *(text.lower() for text in options.missing_values)}
        self.numbers = {float(text) for text in options.missing_values if is_number(text) and is_finite(text)}

    def __contains__(self, text: str) -> bool:
        return text.lower() in self._texts or (bool(self.numbers) and is_number(text) and float(text) in self.numbers)


class CellReader:
    """Converts the cells of a table's columns with features, chunk by chunk.

    With `learning`, a column whose `categories` are None becomes one of categories if its first cells look like texts;
    otherwise it has numbers. An empty cell, or one of the texts `missing_values`, is an error unless `missing` says
    otherwise.
    """

    def __init__(self, path: Path, columns: Sequence[Column], learning: bool, options: Options) -> None:
        self._missing = Missing(options)
        self._readers = [_ColumnReader(path, column, learning, options, self._missing) for column in columns]

    def convert(self, lines: Sequence[int], rows: Sequence[Sequence[str]]) -> np.ndarray:
        """The cells of these rows as float64 (rows, columns): NaN for an empty cell.

        `lines` are the rows' positions in the file, for messages. Raises DataError with line and column.
        """
        if all(map(is_plain, map("".join, rows))) and not any(reader.is_special for reader in self._readers):
            with suppress(ValueError), np.errstate(over="ignore"):
                numbers = np.array(rows, np.float64)
                if np.isfinite(numbers.astype(np.float32)).all() and np.abs(numbers).max() < LARGEST_INTEGER:
                    for reader in self._readers:
                        reader.has_numbers = True
                    return numbers
        cells = zip(*rows, strict=True)
        return np.stack([x.convert(lines, texts) for x, texts in zip(self._readers, cells, strict=True)], axis=1)

    def warn(self) -> None:
        """Warn about what was read otherwise than it is written: texts as empty cells, and integers without digits."""
        for reader in self._readers:
            reader.warn()

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns with all their categories; the code of a category is its index."""
        return tuple(reader.column for reader in self._readers)


class _ColumnReader:
    """Converts the cells of one column."""

    def __init__(self, path: Path, column: Column, learning: bool, options: Options, missing: Missing) -> None:
        self.path, self._column, self.learning, self.missing = path, column, learning, missing
        self.allow_empty = options.missing != "error"
        self.has_categories = column.categories is not None
        self.has_numbers = not self.has_categories and not learning
        self.listed = self.has_categories or not learning
        self.codes = {text: i for i, text in enumerate(column.categories or ())}
        self._emptied: Counter[str] = Counter()
        self._rounded: str | None = None

    @property
    def is_special(self) -> bool:
        """Whether NumPy's numbers of the cells are not those of the column."""
        return self.has_categories or bool(self.missing.numbers)

    @property
    def column(self) -> Column:
        return replace(self._column, categories=tuple(self.codes) if self.has_categories else None)

    def convert(self, lines: Sequence[int], cells: Sequence[str]) -> np.ndarray:
        given = list(map(cleaned, cells))
        texts = ["" if text in self.missing else text for text in given]
        filled = [text for text in texts if text]
        if len(filled) < len(texts):
            if not self.allow_empty:
                first = texts.index("")
                raise self._empty(lines[first], given[first])
            self._emptied.update(text for text, kept in zip(given, texts, strict=True) if text and not kept)
        if filled and not (self.has_numbers or self.has_categories):
            self.has_numbers = any(map(NUMBER_LIKE.match, filled))
            self.has_categories = not self.has_numbers
        return self._codes(lines, texts) if self.has_categories else self._numbers(lines, texts)

    def _empty(self, line: int, text: str) -> DataError:
        found = f"found {quoted(text) if text else 'an empty cell'} in {self._name}"
        stands = " which stands for an empty cell unless data.missing_values says otherwise," if text else ""
        expected = "expected a value; data.missing: mean, zero or drop allows empty cells"
        return self._error(line, f"{found},{stands} {expected}")

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
                    self._note_rounded(texts, numbers)
                    return numbers
        for line, text in zip(lines, texts, strict=True):
            if text and not (is_plain(text) and is_finite(text)):
                advice = "; if the column has categories, list it in data.categories" if self.learning else ""
                raise self._wrong(line, text, f"expected a finite number{advice}")
        raise AssertionError(f"{self.path}: NumPy cannot convert cells that are all finite numbers or empty")

    def _note_rounded(self, texts: Sequence[str], numbers: np.ndarray) -> None:
        for i in np.flatnonzero(np.abs(numbers) >= LARGEST_INTEGER).tolist() if self._rounded is None else ():
            if re.fullmatch(r"[+-]?\d{,400}", texts[i]) and int(texts[i]) != int(numbers[i]):
                self._rounded = texts[i]
                return

    def warn(self) -> None:
        """See `CellReader.warn`. In a column of numbers it is evident that other texts stand for empty cells."""
        place = visible(str(self.path))
        if self._emptied and self.has_categories and self.learning:
            listed = first_names([f"{quoted(text)} ({count:,})" for text, count in self._emptied.items()])
            advice = "data.missing_values: [] reads such texts as categories"
            _log.warning("adtrain: warning: %s: %s: read %s as empty cells; %s", place, self._name, listed, advice)
        if self._rounded is not None:
            reason = f"float64 loses the last digits of {self._rounded[:40]} and others"
            advice = "subtract a constant from them, or leave the column out by data.drop"
            _log.warning("adtrain: warning: %s: %s: %s; %s", place, self._name, reason, advice)

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
    try:
        return abs(float(text)) < FLOAT32_INFINITY
    except ValueError:
        return False
