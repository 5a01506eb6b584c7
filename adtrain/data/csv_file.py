"""CSV and TSV files: their options, how they are opened, their headers and texts, and a survey of their columns.

The survey is of what a table has in its columns, to propose options of reading it.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from adtrain.data.errors import DataError, DataOptionError, printable, quoted
from adtrain.data.part import Columns, ShapeOptions
from adtrain.files import open_regular
from adtrain.option_types import Bounds, Expected, Items, Matches
from adtrain.text import first_names

BLANKS = {0xA0: " ", 0x2007: " ", 0x202F: " ", 0x200B: None, 0xFEFF: None}
"""No-break spaces, which are read as spaces, and characters without width, which are left out."""


LONGEST_CELL = 2**31 - 1
"""Characters of a cell. The limit of Python's module csv is 131,072 by default."""


SEPARATOR = re.compile(r'sep=([^"\r\n\x00])\r?\n?')


SEPARATOR_LENGTH = 7
"""Characters of the longest such line."""


COMPARED_ROWS = 100
"""The lines after the first one that tell whether that is a header."""


YEARS = range(1800, 2101)
"""Numbers that a header has rather than other numbers."""


FLOAT32_INFINITY = 2.0**128 - 2.0**103
"""From here on float32 rounds to infinity."""


MAX_CATEGORIES = 1000
"""The maximum number of categories of a column. Each becomes a feature."""


NUMBER_LIKE = re.compile(r"\W*\d|[+-]?inf(inity)?$", re.IGNORECASE)
"""Texts that could be numbers, also in notations that are not read, such as 1,5: by default they are not categories."""


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
        missing: what to do with an empty cell: fill it with mean or zero, drop its row, or error
        missing_values: the texts and numbers that stand for an empty cell, in upper and lower case
    """

    label: ColumnKey | None = None
    target: Targets | None = None
    header: bool | None = None
    delimiter: Delimiter | None = None
    drop: ColumnKeys = ()
    categories: ColumnKeys = ()
    category_encoding: Encoding = "one_hot"
    missing: Literal["error", "mean", "zero", "drop"] = "error"
    missing_values: Annotated[tuple[str | int | float, ...], Expected("a list of texts and numbers")] = MISSING_VALUES

    def __post_init__(self) -> None:
        if self.delimiter == r"\t":
            object.__setattr__(self, "delimiter", "\t")


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
def opened(path: Path, options: CsvOptions, known: Columns | None) -> Iterator[Opened]:
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


def _opened(path: Path, lines: Iterator[Line], delimiter: str, options: CsvOptions, known: Columns | None) -> Opened:
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


class Missing:
    """The texts that stand for an empty cell; those that are numbers also in another notation, as -999 and -999.0."""

    def __init__(self, options: CsvOptions) -> None:
        texts = list(map(str, options.missing_values))
        self._texts = {"", *map(str.lower, texts)}
        self.numbers = {float(text) for text in texts if is_number(text) and is_finite(text)}

    def __contains__(self, text: str) -> bool:
        return text.lower() in self._texts or (bool(self.numbers) and is_number(text) and float(text) in self.numbers)


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


def cleaned(text: str) -> str:
    """A name or cell as it is compared with others: without blanks around it, and with composed letters (NFC)."""
    if text.isascii():
        return text.strip()
    return unicodedata.normalize("NFC", text.translate(BLANKS)).strip()


LABEL_NAMES = ("label", "class", "target", "y")
"""Names of the column to predict, in lower case; without one of them it is the last column."""

IDENTIFIERS = ("id", "index")
"""Names of columns that only number the rows, in lower case."""

UNIQUE = re.compile(r"(?i:.*[ _-](id|index)|row ?id|unnamed: *\d+|)|.*[a-z]I[dD]")
"""Names of columns that number the rows if no value occurs twice. pandas writes an index without a name."""

NUMBER = re.compile(r"[+-]?[$€£]? ?\d{1,3}(([ ,.']\d{3})+|\d*)([.,]\d+)? ?[%$€£]?")
"""Numbers in the notations of spreadsheets, such as 1,5 or 1.000,00 or 12% or $5, which are not read."""

DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}([T ].*)?")

MOST_LISTED = 5

MOST_CLASSES = 20
"""Maximum different integers that are proposed as classes, and maximum texts as categories if none repeats."""


@dataclass(eq=False)
class Survey:
    """The cells of one column: up to MAX_CATEGORIES + 1 different `texts`, and the `markers` of empty cells.

    `key` is what options call the column, `name` is None without a header. `counts_rows` says whether the cells are
    0, 1, ... or 1, 2, ...
    """

    key: str | int
    name: str | None
    title: str
    missing: Missing
    cells: int = 0
    texts: set[str] = field(default_factory=set)
    markers: dict[str, None] = field(default_factory=dict)
    numbers: bool = True
    integers: bool = True
    empty: bool = False
    counts_rows: bool = True
    start: int = 0

    def add(self, text: str) -> None:
        if text in self.missing:
            self.empty, self.counts_rows = True, False
            if text:
                self.markers[text] = None
            return
        if len(self.texts) <= MAX_CATEGORIES:
            self.texts.add(text)
        self.numbers = self.numbers and is_plain(text) and is_finite(text)
        self.integers = self.numbers and self.integers and float(text).is_integer()
        if not self.cells and text in ("0", "1"):
            self.start = int(text)
        self.counts_rows = self.counts_rows and text == str(self.start + self.cells)
        self.cells += 1

    @property
    def has_too_many_texts(self) -> bool:
        """Whether there are more than MAX_CATEGORIES texts, or more than MOST_CLASSES that occur once in most cells."""
        return len(self.texts) > min(MAX_CATEGORIES, max(self.cells // 2, MOST_CLASSES))

    @property
    def looks_numeric(self) -> bool:
        """Whether a cell is, or could be, a number."""
        return any(map(NUMBER_LIKE.match, self.texts))

    @property
    def has_dates(self) -> bool:
        return bool(self.texts) and all(map(DATE.fullmatch, self.texts))

    @property
    def is_text(self) -> bool:
        return not self.numbers and not self.has_other_notation

    @property
    def is_identifier(self) -> bool:
        """Whether the column only numbers the rows, as its name says."""
        if self.name is None:
            return False
        differs = self.cells > 1 and len(self.texts) in (self.cells, MAX_CATEGORIES + 1)
        return self.name.lower() in IDENTIFIERS or (differs and UNIQUE.fullmatch(self.name) is not None)

    @property
    def has_other_notation(self) -> bool:
        """Whether the cells are numbers, but not as they are read."""
        return not self.numbers and all(map(NUMBER.fullmatch, self.texts))

    @property
    def has_classes(self) -> bool:
        return not self.numbers or (self.integers and len(self.texts) <= MOST_CLASSES)


class Proposal(NamedTuple):
    """Keys of the data section, and for some of them what to say about them."""

    keys: dict[str, object]
    comments: dict[str, str]


def propose(path: Path, options: CsvOptions) -> Proposal:
    """Keys of the data section with which the table can be read, in addition to those of the options.

    `label` or `target` is the column to predict. `drop` has columns with too many texts, such as names, with dates,
    with identifiers, or without values. `categories` has columns with both numbers and texts. `missing` is mean if
    cells are empty. A column with numbers such as 1,5 or 12% is in none of them, so that reading it is an error.
    Raises DataError where the table cannot be read, and DataOptionError where a column has too many texts for classes.
    """
    with opened(path, options, None) as table:
        missing = Missing(options)
        columns = []
        for i, first in enumerate(table.first):
            key = first if first and len(table.positions.get(first, ())) == 1 else i
            columns.append(Survey(key, table.name(i), table.title(i), missing))
        option, asked = ("label", options.label) if options.target is None else ("target", options.target)
        given = () if asked is None else asked if isinstance(asked, tuple) else (asked,)
        predicted = [columns[table.column(option, x)] for x in given]
        dropped = {table.column("drop", x) for x in options.drop}
        for line, row in table.lines:
            for column, cell in zip(columns, table.row(line, row), strict=True):
                column.add(cleaned(cell))
        found: dict[str, object] = {"header": table.header}
    columns = [column for i, column in enumerate(columns) if i not in dropped]
    if not predicted:
        named = [x for x in columns if str(x.name).lower() in LABEL_NAMES]
        predicted = [(named or [x for x in columns if x.cells][-1:] or columns[-1:])[0]]
        found["label" if predicted[0].has_classes else "target"] = predicted[0].key
        _check_predicted(predicted[0])
    chosen = set(predicted)
    features = [column for column in columns if column not in chosen]
    left_out = [
        x for x in features if x.is_identifier or x.has_dates or not x.cells or (x.is_text and x.has_too_many_texts)
    ]
    not_read = set(left_out)
    read = [x for x in features if x not in not_read]
    if len(read) > 1 and read[0] is columns[0] and read[0].counts_rows and read[0].cells > MOST_CLASSES:
        left_out.append(read.pop(0))
    mixed = [x for x in read if x.is_text and x.looks_numeric]
    for option, given_up in (("drop", left_out), ("categories", mixed)):
        if given_up:
            found[option] = [*getattr(options, option), *(x.key for x in given_up)]
    comments = {}
    if any(column.empty for column in read) and options.missing == "error":
        found["missing"] = "mean"
        markers = [f"{first_names(list(map(quoted, x.markers)), MOST_LISTED)} in {x.title}" for x in read if x.markers]
        if markers:
            comments["missing"] = (
                f"fills empty cells, which include {first_names(markers, MOST_LISTED)}, see missing_values"
            )
    return Proposal(found, comments)


def _check_predicted(column: Survey) -> None:
    """Raise DataOptionError for a column to predict, chosen by its place, that has neither classes nor numbers."""
    advice = "name the column to predict, such as --set label=NAME or --set target=NAME"
    if column.has_other_notation:
        text = quoted(next(text for text in sorted(column.texts) if not is_number(text)))
        expected = f"expected numbers such as 1.5, or classes; {advice}"
        raise DataOptionError("label", f"found {text} in {column.title}, {expected}")
    if not column.numbers and column.has_too_many_texts:
        what = f"more than {MAX_CATEGORIES:,}" if len(column.texts) > MAX_CATEGORIES else len(column.texts)
        raise DataOptionError("label", f"found {what} different texts in {column.title}, expected classes; {advice}")
