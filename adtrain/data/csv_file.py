"""CSV and TSV files: their options, how they are opened, their headers, and the texts that stand for empty cells."""

from __future__ import annotations

import csv
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Literal

from adtrain.core.options import Bounds, Expected, Matches
from adtrain.data.errors import DataError, DataOptionError, printable
from adtrain.data.notation import Decimal, Notation, cleaned, days, is_finite, is_number
from adtrain.data.part import Columns, ShapeOptions
from adtrain.files import open_regular
from adtrain.option_types import Items, Text
from adtrain.text import first_names

LONGEST_CELL = 2**31 - 1
"""Characters of a cell. The limit of Python's module csv is 131,072 by default."""


SEPARATOR = re.compile(r'sep=([^"\r\n\x00])\r?\n?')
"""A first line that names the delimiter, as Excel reads it."""


SEPARATOR_LENGTH = 7
"""Characters of the longest line that SEPARATOR matches."""


DELIMITERS = ";,\t|"
"""The usual characters between two columns."""


COMPARED_ROWS = 100
"""The lines after the first one that tell whether that is a header."""


YEARS = range(1800, 2101)
"""Numbers that a header has rather than other numbers."""


MAX_CATEGORIES = 1000
"""The maximum number of categories of a column. Each becomes a feature."""


MISSING_VALUES = ("NA", "N/A", "#N/A", "<NA>", "NaN", "NaT", "null", "None", "?", "-", ".")
"""Texts that other programs write for a missing value."""


ColumnKey = Annotated[
    Annotated[int, Bounds(gt=-(2**31), lt=2**31)] | str, Expected("the name of a column, or its number")
]
"""A column by name, or by its index from 0, or from -1 backwards."""


Targets = Annotated[
    ColumnKey | Annotated[tuple[ColumnKey, ...], Items(1)],
    Expected("the name of a column or its number, or a list of them"),
]


ColumnKeys = Annotated[tuple[ColumnKey, ...], Expected("a list of names or numbers of columns")]


Delimiter = Annotated[
    str,
    Matches(r'^(\\t|[^"\r\n\x00])$'),
    Expected(r"one character other than a quote or the end of a line; \t for a tab"),
]


Encoding = Literal["one_hot", "index"]


Line = tuple[int, list[str]]
"""The number of a line in the file, and its values."""


@dataclass(frozen=True)
class CsvOptions(ShapeOptions):
    """The options of a table.

    Attributes:
        label: the column of the labels, by name or number; default: label
        target: the column or columns of numbers to predict, by name or number, instead of label
        header: whether the first line names the columns; default: detected
        delimiter: the character between two columns; default: a tab in .tsv files, a comma in others
        drop: columns that are not read, by name or number
        categories: columns whose values are categories even if they look like numbers
        category_encoding: one_hot: a feature for each category; index: one feature, the category's number, for a layer
            embedding
        dates: columns of dates, by name or number; each becomes five features
        date_format: how the dates are written, such as "%d/%m/%Y"; default: 2024-12-31 or 31.12.2024
        decimal: the decimal mark of numbers, which can then have separators of thousands, such as 1.234,5 with a comma;
            default: a point, without thousands
        missing: what to do with an empty cell: fill it with mean or zero, drop its row, or error; with all but error a
            row without a label or target is left out
        missing_values: the texts and numbers that stand for an empty cell, in upper and lower case
    """

    label: ColumnKey | None = None
    target: Targets | None = None
    header: bool | None = None
    delimiter: Delimiter | None = None
    drop: ColumnKeys = ()
    categories: ColumnKeys = ()
    category_encoding: Encoding = "one_hot"
    dates: ColumnKeys = ()
    date_format: Text | None = None
    decimal: Decimal | None = None
    missing: Literal["error", "mean", "zero", "drop"] = "error"
    missing_values: Annotated[tuple[str | int | float, ...], Expected("a list of texts and numbers")] = MISSING_VALUES

    def __post_init__(self) -> None:
        if self.delimiter == r"\t":
            object.__setattr__(self, "delimiter", "\t")

    @property
    def notation(self) -> Notation:
        return Notation(self.decimal)


@dataclass(frozen=True)
class Opened:
    """An open table: its first line, whether that has the names of the columns, and the lines with values.

    `before` is the number of lines of the file before the values; None for a table in memory.
    """

    path: Path
    first: list[str]
    header: bool
    lines: Iterator[Line]
    delimiter: str = ","
    before: int | None = None

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
def opened(path: Path, options: CsvOptions, known: Columns | None) -> Iterator[Opened]:
    """The open table. Errors of reading the file during the `with` block become DataError.

    By default `names_columns` says whether the first line is a header; it is one if the columns `known` have names. A
    line sep=; before it, as Excel reads it, sets the delimiter. A delimiter at the end of lines makes no column.
    """
    delimiter = options.delimiter or _default_delimiter(path)
    csv.field_size_limit(max(LONGEST_CELL, csv.field_size_limit()))
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            skipped = 0
            if separator := SEPARATOR.fullmatch(file.readline(SEPARATOR_LENGTH)):
                skipped, delimiter = 1, options.delimiter or separator[1]
            else:
                file.seek(0)
            yield _opened(path, csv_lines(file, path, delimiter, skipped), delimiter, options, known)
    except UnicodeDecodeError as error:
        encoding = "utf-16" if error.object[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) and not error.start else "latin1"
        advice = f"if it is {encoding}, iconv -f {encoding} -t utf-8 FILE converts it"
        raise DataError(f"{path}: found an invalid byte at {error.start}, expected UTF-8 text; {advice}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _default_delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def other_delimiter(path: Path) -> str | None:
    """The delimiter that divides each of the first lines into equally many columns, if the default one does not.

    Raises DataError where the file cannot be read.
    """
    default = _default_delimiter(path)
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = list(islice(file, COMPARED_ROWS))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if lines and SEPARATOR.fullmatch(lines[0]):
        return None
    for delimiter in (default, *DELIMITERS):
        with suppress(DataError):
            widths = {len(row) for _, row in csv_lines(lines, path, delimiter, 0)}
            if len(widths) == 1 and widths != {1}:
                return None if delimiter == default else delimiter
    return None


def csv_lines(file: Iterable[str], path: Path, delimiter: str, before: int) -> Iterator[Line]:
    """The rows of an open file, behind `before` lines, without blank lines. Raises DataError for invalid CSV."""
    # A blank before a quote belongs to the delimiter.
    reader = csv.reader(file, strict=True, delimiter=delimiter, skipinitialspace=delimiter != " ")
    try:
        for row in reader:
            if len(row) > 1 or any(map(cleaned, row)):
                yield before + reader.line_num, row
    except csv.Error as error:
        line = before + reader.line_num
        raise DataError(f"{path}:{line}: found invalid CSV ({error}), expected a table") from error


def _opened(path: Path, lines: Iterator[Line], delimiter: str, options: CsvOptions, known: Columns | None) -> Opened:
    line, first = next(lines, (0, list[str]()))
    if len(first) < 2 and (known is None or not first):
        separated = {",": "commas", "\t": "tabs"}.get(delimiter, repr(delimiter))
        other = next((repr(x) for x in DELIMITERS if first and x in first[0]), "another separator")
        advice = f"separated by {separated}; set data.delimiter to {other}"
        if not first:
            raise DataError(f"{path}: found no lines, expected one for each example")
        raise DataError(f"{path}: found 1 column, expected at least 2, {advice}")
    names, compared = list(map(cleaned, first)), list(islice(lines, COMPARED_ROWS))
    compared_rows = [row for _, row in compared]
    header = options.header if known is None else known.features[0].name is not None
    if header is None and (header := names_columns(names, compared_rows, options.notation.is_signed_number)) is None:
        reason = f"expected true or false: line {line} of {path} has numbers and texts, so it can be names or values"
        raise DataOptionError("header", f"missing, {reason}")
    ends = (
        len(names) > 2 and not names[-1] and not any(any(map(cleaned, row[len(names) - 1 :])) for row in compared_rows)
    )
    if ends and (header or known is None or len(names) > known.width):
        names.pop()
    values = chain([] if header else [(line, first)], compared, lines)
    return Opened(path, names, header, values, delimiter, line if header else line - 1)


def names_columns(
    first: Sequence[str], rows: Sequence[Sequence[str]], is_number: Callable[[str], bool] = is_number
) -> bool | None:
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


class Missing:
    """The texts that stand for an empty cell; those that are numbers also written otherwise, as -999 and -999.0.

    Texts in `missing_values` are written as in the table.
    """

    def __init__(self, options: CsvOptions) -> None:
        self._notation = options.notation
        given = [x if isinstance(x, str) else self._notation.written(x) for x in options.missing_values]
        self._texts = {"", *map(str.lower, given)}
        self.numbers = {float(x) for x in map(self._notation.in_python, given) if is_number(x) and is_finite(x)}

    @property
    def has_dates(self) -> bool:
        """Whether a text is a date; some have letters, as 2024-12-31T23:59Z."""
        return any(days(text.upper(), None) is not None for text in self._texts)

    def __contains__(self, text: str) -> bool:
        if text.lower() in self._texts:
            return True
        number = self._notation.in_python(text) if self.numbers else ""
        return is_number(number) and float(number) in self.numbers


def column_title(position: int, name: str | None) -> str:
    """The column for messages, such as `column 1 (width)`."""
    return f"column {position}" if name is None else f"column {position} ({printable(name)})"


def columns_at_end(options: CsvOptions, known: Columns) -> int:
    """The number of columns of labels or targets, if they are known by number and the last ones; otherwise 0."""
    target = options.label if options.target is None else options.target
    given = target if isinstance(target, tuple) else (target,)
    found = {column % known.width for column in given if isinstance(column, int)}
    begin = known.width - len(given)
    features_before = all(column.position < begin for column in known.features)
    return len(given) if found == set(range(begin, known.width)) and features_before else 0
