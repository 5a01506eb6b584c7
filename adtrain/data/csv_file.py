"""An open CSV or TSV file: its header and its lines."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path

from adtrain.data.columns import Columns, cleaned, printable
from adtrain.data.csv_cells import column_title, is_number
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options
from adtrain.files import open_regular
from adtrain.text import first_names

LONGEST_CELL = 2**31 - 1
"""Characters of a cell. The limit of Python's module csv is 131,072 by default."""

SEPARATOR = re.compile(r'sep=([^"\r\n\x00])\r?\n?')
SEPARATOR_LENGTH = 7
"""Characters of the longest such line."""

COMPARED_ROWS = 100
"""The lines after the first one that tell whether that is a header."""

YEARS = range(1800, 2101)
"""Numbers that a header has rather than other numbers."""

Line = tuple[int, list[str]]
"""The number of a line in the file, and its values."""


def is_table(path: Path | str, format_: str | None) -> bool:
    """Whether the file is read as a table: `format_` says so, or without a format its name ends in .csv or .tsv."""
    return format_ == "csv" or (format_ is None and Path(path).suffix.lower() in (".csv", ".tsv"))


@dataclass(frozen=True)
class Opened:
    """An open table: its first line, whether that has the names of the columns, and the lines with values."""

    path: Path
    first: list[str]
    header: bool
    lines: Iterator[Line]

    @cached_property
    def positions(self) -> dict[str, list[int]]:
        """The indices of the columns with each name; empty without a header."""
        found: dict[str, list[int]] = {}
        for i, name in enumerate(self.first if self.header else ()):
            found.setdefault(name, []).append(i)
        return found

    def name(self, column: int) -> str | None:
        return self.first[column] if self.header else None

    def title(self, column: int) -> str:
        """The column for messages, such as `column 1 (width)`."""
        return column_title(column, self.name(column))

    def listed(self) -> str:
        """The columns, for messages."""
        if not self.header:
            return f"there is no header, the columns are 0 to {len(self.first) - 1}"
        return f"the columns are {first_names(list(map(printable, self.first)))}"

    def column(self, option: str, given: str | int) -> int:
        """The index, from 0, of the column that an option names. Raises DataOptionError unless there is one."""
        if isinstance(given, int) and -len(self.first) <= given < len(self.first):
            return given % len(self.first)
        found = self.positions.get(cleaned(given), []) if isinstance(given, str) else []
        if len(found) > 1:
            reason = f"found {given!r}, the name of columns {found[0]} and {found[1]} of {self.path}"
            raise DataOptionError(option, f"{reason}, expected the number of one of them, or different names")
        if found:
            return found[0]
        raise DataOptionError(option, f"found {given!r}, which is not a column of {self.path}: {self.listed()}")

    def row(self, line: int, row: list[str]) -> list[str]:
        """The row without an empty cell after its last column. Raises DataError if it has another number of columns."""
        width = len(self.first)
        if len(row) == width or (len(row) == width + 1 and not cleaned(row[width])):
            return row[:width]
        raise DataError(f"{self.path}:{line}: found {len(row)} values, expected {width} as in the first line")


@contextmanager
def opened(path: Path, options: Options, known: Columns | None) -> Iterator[Opened]:
    """The open table. Errors of reading the file during the `with` block become DataError.

    By default `names_columns` says whether the first line is a header; it is one if the columns `known` have names. A
    line sep=; before it, as Excel reads it, sets the delimiter. A delimiter at the end of lines makes no column.
    """
    delimiter = options.delimiter or ("\t" if path.suffix.lower() == ".tsv" else ",")
    csv.field_size_limit(max(LONGEST_CELL, csv.field_size_limit()))
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            skipped = 0
            if separator := SEPARATOR.fullmatch(file.readline(SEPARATOR_LENGTH)):
                skipped, delimiter = 1, options.delimiter or separator[1]
            else:
                file.seek(0)
            # A blank before a quote belongs to the delimiter.
            reader = csv.reader(file, strict=True, delimiter=delimiter, skipinitialspace=delimiter != " ")
            lines = ((reader.line_num + skipped, row) for row in reader if len(row) > 1 or any(map(cleaned, row)))
            try:
                yield _opened(path, lines, delimiter, options, known)
            except csv.Error as error:
                line = reader.line_num + skipped
                raise DataError(f"{path}:{line}: found invalid CSV ({error}), expected a table") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: found an invalid byte at {error.start}, expected UTF-8 text") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _opened(path: Path, lines: Iterator[Line], delimiter: str, options: Options, known: Columns | None) -> Opened:
    line, first = next(lines, (0, list[str]()))
    if len(first) < 2 and (known is None or not first):
        separated = {",": "commas", "\t": "tabs"}.get(delimiter, repr(delimiter))
        other = next((repr(x) for x in ";,\t|" if first and x in first[0]), "another separator")
        advice = f"separated by {separated}; set data.delimiter to {other}"
        if not first:
            raise DataError(f"{path}: found no lines, expected one for each example")
        raise DataError(f"{path}: found 1 column, expected at least 2, {advice}")
    names, compared = list(map(cleaned, first)), list(islice(lines, COMPARED_ROWS))
    header = options.header if known is None else known.features[0].name is not None
    if header is None and (header := names_columns(names, [row for _, row in compared])) is None:
        reason = f"expected true or false: line {line} of {path} has numbers and texts, so it can be names or values"
        raise DataOptionError("header", f"missing, {reason}")
    ends = len(names) > 2 and not names[-1] and not any(any(map(cleaned, row[len(names) - 1 :])) for _, row in compared)
    if ends and (header or known is None or len(names) > known.width):
        names.pop()
    return Opened(path, names, header, chain([] if header else [(line, first)], compared, lines))


def names_columns(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool | None:
    """Whether `first` (cleaned) has names, by comparison with the lines that follow it; None if they do not tell.

    A line without a number has names. One with numbers and texts has names if a text is above numbers only, or if all
    its numbers are years, above other numbers. It has values if a text occurs again in its column.
    """
    numbers = [i for i, cell in enumerate(first) if is_number(cell)]
    texts = [i for i, cell in enumerate(first) if cell and not is_number(cell)]
    if not numbers:
        return True
    below = {i: [cell for row in rows for cell in map(cleaned, row[i : i + 1]) if cell] for i in range(len(first))}
    if any(first[i] in below[i] for i in texts):
        return False
    if any(below[i] and all(map(is_number, below[i])) for i in texts):
        return True
    different = len({first[i] for i in numbers}) == len(numbers)
    if different and all(_is_year(first[i]) and below[i] and not any(map(_is_year, below[i])) for i in numbers):
        return True
    repeated = any(2 * len(set(below[i])) <= len(below[i]) for i in texts)
    return None if repeated else False


def _is_year(text: str) -> bool:
    return text.isdecimal() and text.isascii() and int(text[:9]) in YEARS
