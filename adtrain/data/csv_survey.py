"""A survey of what a CSV file has in its columns, to propose options of reading it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from adtrain.data.csv_file import MAX_CATEGORIES, CsvOptions, Missing, opened, other_delimiter
from adtrain.data.errors import DataError, DataOptionError, quoted
from adtrain.data.notation import DATE_LIKE, DECIMALS, NUMBER_LIKE, Decimal, Notation, cleaned, days, expected_number
from adtrain.text import first_names

LABEL_NAMES = ("label", "class", "target", "y")
"""Names of the column to predict, in lower case; without one of them it is the last column."""

IDENTIFIERS = ("id", "index")
"""Names of columns that only number the rows, in lower case."""

UNIQUE = re.compile(r"(?i:.*[ _-](id|index)|row ?id|unnamed: *\d+|)|.*[a-z]I[dD]")
"""Names of columns that number the rows if no value occurs twice. pandas writes an index without a name."""

NUMBER = re.compile(r"[+-]?[$€£]? ?\d{1,3}(([ ,.']\d{3})+|\d*)([.,]\d+)? ?[%$€£]?")
"""Numbers in the notations of spreadsheets, such as 1,5 or 1.000,00 or 12% or $5."""

CODE = re.compile(r"0\d+")
"""Digits that begin with 0, as in postal codes, but not in numbers: a column with such a text has codes."""

DATE_FORMATS = (
    None,
    *(
        day + time
        for day in ("%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y")
        for time in ("", " %H:%M", " %H:%M:%S")
    ),
)
"""The formats of dates that are proposed. Dates that two of them fit are not."""

MOST_LISTED = 5

MOST_WORDS = 3
"""Maximum different texts among numbers that are proposed as marks of empty cells."""

MOST_CLASSES = 20
"""Maximum different integers that are proposed as classes, and maximum texts as categories if none repeats."""


@dataclass(eq=False)
class Survey:
    """The cells of one column: up to MAX_CATEGORIES + 1 different `texts`, and the `markers` of empty cells.

    `key` is what options call the column, `name` is None without a header. `counts_rows` says whether the cells are
    0, 1, ... or 1, 2, ... `codes` says whether one is a `CODE`. `decimals` are the decimal marks with which all cells
    are numbers. `words` are up to MOST_WORDS + 1 different texts that do not look like numbers.
    """

    key: str | int
    name: str | None
    title: str
    missing: Missing
    notation: Notation
    cells: int = 0
    texts: set[str] = field(default_factory=set)
    markers: dict[str, None] = field(default_factory=dict)
    words: dict[str, None] = field(default_factory=dict)
    numbers: bool = True
    integers: bool = True
    codes: bool = False
    empty: bool = False
    counts_rows: bool = True
    start: int = 0
    decimals: tuple[Decimal, ...] = DECIMALS

    def add(self, text: str) -> None:
        if text in self.missing:
            self.empty, self.counts_rows = True, False
            if text:
                self.markers[text] = None
            return
        if text not in self.texts:
            self._add_new(text)
        if not self.cells and text in ("0", "1"):
            self.start = int(text)
        self.counts_rows = self.counts_rows and text == str(self.start + self.cells)
        self.cells += 1

    def _add_new(self, text: str) -> None:
        if not self.texts:
            self.notation = self.notation.of(text)
        if len(self.texts) <= MAX_CATEGORIES:
            self.texts.add(text)
        if len(self.words) <= MOST_WORDS and not NUMBER_LIKE.match(text):
            self.words[text] = None
        self.codes = self.codes or CODE.fullmatch(text) is not None
        self.numbers = self.numbers and self.notation.is_finite(text)
        self.integers = self.numbers and self.integers and float(self.notation.in_python(text)).is_integer()
        if self.decimals:
            self.decimals = tuple(x for x in self.decimals if Notation(x, self.notation.sign).is_finite(text))

    @property
    def has_too_many_texts(self) -> bool:
        """Whether there are more than MAX_CATEGORIES texts, or more than MOST_CLASSES that occur once in most cells."""
        return len(self.texts) > min(MAX_CATEGORIES, max(self.cells // 2, MOST_CLASSES))

    @property
    def looks_numeric(self) -> bool:
        """Whether a cell is, or could be, a number."""
        return any(map(NUMBER_LIKE.match, self.texts))

    @property
    def least_text(self) -> str:
        """The first text in sorted order that could not be a number; the first of all if each could."""
        return min(self.texts, key=lambda text: (NUMBER_LIKE.match(text) is not None, text))

    @property
    def has_dates(self) -> bool:
        like = list(map(DATE_LIKE.fullmatch, self.texts))
        return any(like) and all(x or days(text, None) is not None for x, text in zip(like, self.texts, strict=True))

    def has_dates_as(self, form: str | None) -> bool:
        """Whether all cells are dates, written so."""
        return self.has_dates and all(days(text, form) is not None for text in self.texts)

    @property
    def is_text(self) -> bool:
        return (self.codes and self.integers) or (not self.numbers and not self.has_other_notation)

    @property
    def is_identifier(self) -> bool:
        """Whether the column only numbers the rows, as its name says."""
        if self.name is None:
            return False
        differs = self.cells > 1 and len(self.texts) in (self.cells, MAX_CATEGORIES + 1)
        return self.name.lower() in IDENTIFIERS or (differs and UNIQUE.fullmatch(self.name) is not None)

    @property
    def has_other_notation(self) -> bool:
        """Whether the cells are numbers, but in another notation than the one that is read."""
        return not self.numbers and all(map(NUMBER.fullmatch, self.texts))

    @property
    def has_marked_numbers(self) -> bool:
        """Whether the cells are many different numbers, but for a few words that may stand for empty cells."""
        numbers = self.texts - self.words.keys()
        are_few = 0 < len(self.words) <= MOST_WORDS and len(numbers) > MOST_CLASSES
        return are_few and not self.codes and all(map(NUMBER.fullmatch, numbers))

    @property
    def reason(self) -> str:
        """Why the column is not read."""
        if not self.cells:
            return "no values"
        if self.is_identifier or self.counts_rows:
            return "identifiers"
        return "ambiguous dates" if self.has_dates else "too many different texts"

    @property
    def has_classes(self) -> bool:
        return not self.numbers or (self.integers and len(self.texts) <= MOST_CLASSES)


class Proposal(NamedTuple):
    """Keys of the data section, and for some of them what to say about them."""

    keys: dict[str, object]
    comments: dict[str, str]


def propose(path: Path, options: CsvOptions) -> Proposal:
    """Keys of the data section with which the table can be read, in addition to those of the options.

    `label` or `target` is the column to predict. `dates` has columns of dates of one format. `drop` has columns with
    too many texts, such as names, with other dates, with identifiers, or without values. `categories` has columns with
    codes, and with both numbers and texts. `missing_values` has a few texts among many numbers, too. `missing` is mean
    if cells are empty, or drop if only cells to predict are. `decimal` is the mark with which all columns of numbers
    can be read, if there is only one; `delimiter` is what divides the lines, if it is not the default. A column with
    other numbers, such as 1_000, is an error when it is read.
    Raises DataError where the table cannot be read, and DataOptionError where a column has too many texts for classes.
    """
    if options.delimiter is None and (delimiter := other_delimiter(path)):
        keys, comments = propose(path, replace(options, delimiter=delimiter))
        return Proposal({"delimiter": delimiter, **keys}, comments)
    with opened(path, options, None) as table:
        missing = Missing(options)
        columns = []
        for i, first in enumerate(table.first):
            key = first if first and len(table.positions.get(first, ())) == 1 else i
            columns.append(Survey(key, table.name(i), table.title(i), missing, options.notation))
        option, asked = ("label", options.label) if options.target is None else ("target", options.target)
        given = () if asked is None else asked if isinstance(asked, tuple) else (asked,)
        predicted = [columns[table.column(option, x)] for x in given]
        dropped = {table.column("drop", x) for x in options.drop}
        listed = {columns[table.column("dates", x)] for x in options.dates}
        for line, row in table.lines:
            for column, cell in zip(columns, table.row(line, row), strict=True):
                column.add(cleaned(cell))
        found: dict[str, object] = {"header": table.header}
    if not any(column.cells or column.empty for column in columns):
        raise DataError(f"{path}: found no rows, expected one per example")
    columns = [column for i, column in enumerate(columns) if i not in dropped]
    if marked := [x for x in columns if x.has_marked_numbers and x not in predicted]:
        words = list(dict.fromkeys(word for x in marked for word in x.words))
        values = *options.missing_values, *words
        keys, comments = propose(path, replace(options, missing_values=values))
        return Proposal({"missing_values": list(values), **keys}, comments)
    if options.decimal is None and (decimal := _decimal(columns)):
        keys, comments = propose(path, replace(options, decimal=decimal))
        return Proposal({"decimal": decimal, **keys}, comments)
    if not predicted:
        named = [x for x in columns if str(x.name).lower() in LABEL_NAMES]
        predicted = [(named or [x for x in columns if x.cells][-1:] or columns[-1:])[0]]
        found["label" if predicted[0].has_classes else "target"] = predicted[0].key
        _check_predicted(predicted[0])
    chosen = set(predicted)
    features = [column for column in columns if column not in chosen and column not in listed]
    form = _date_format(features) if options.date_format is None and not listed else options.date_format
    dates = [x for x in features if x.has_dates_as(form)]
    features = [x for x in features if x not in dates]
    left_out = [
        x for x in features if x.is_identifier or x.has_dates or not x.cells or (x.is_text and x.has_too_many_texts)
    ]
    not_read = set(left_out)
    read = [x for x in features if x not in not_read]
    if len(read) > 1 and read[0] is columns[0] and read[0].counts_rows and read[0].cells > MOST_CLASSES:
        left_out.append(read.pop(0))
    mixed = [x for x in read if x.is_text and x.looks_numeric]
    comments = {}
    if mixed:
        texts = [f"{quoted(x.least_text)} in {x.title}" for x in mixed]
        comments["categories"] = (
            f"columns of codes, or of numbers and texts, such as {first_names(texts, MOST_LISTED)}, see missing_values"
        )
    if left_out:
        reasons = {x.reason: [str(y.key) for y in left_out if y.reason == x.reason] for x in left_out}
        listed_reasons = [f"{reason} ({first_names(titles, MOST_LISTED)})" for reason, titles in reasons.items()]
        comments["drop"] = f"columns that are not read: {', '.join(listed_reasons)}"
    for option, proposed in (("drop", left_out), ("dates", dates), ("categories", mixed)):
        if proposed:
            found[option] = [*getattr(options, option), *(x.key for x in proposed)]
    if form is not None:
        found["date_format"] = form
    are_empty, lack_labels = any(x.empty for x in (*read, *dates, *listed)), any(x.empty for x in predicted)
    if options.missing == "error" and (are_empty or lack_labels):
        found["missing"] = "mean" if are_empty else "drop"
        markers = [f"{first_names(list(map(quoted, x.markers)), MOST_LISTED)} in {x.title}" for x in read if x.markers]
        if markers:
            comments["missing"] = (
                f"fills empty cells, which include {first_names(markers, MOST_LISTED)}, see missing_values"
            )
        if lack_labels:
            fills = comments.get("missing", "fills empty cells")
            what = f"leaves out rows without {first_names([str(x.key) for x in predicted if x.empty], MOST_LISTED)}"
            comments["missing"] = f"{fills}; {what}" if are_empty else what
    return Proposal(found, comments)


def _decimal(columns: Sequence[Survey]) -> Decimal | None:
    """The decimal mark with which columns of numbers in another notation can be read, and those in Python's too.

    None without such a column, or if both marks fit, as in 1,234.
    """
    written = [x for x in columns if x.cells and x.decimals and not x.numbers]
    numbers = [*written, *(x for x in columns if x.cells and x.numbers)]
    fitting = [mark for mark in DECIMALS if all(mark in x.decimals for x in numbers)]
    return fitting[0] if written and len(fitting) == 1 else None


def _date_format(columns: Sequence[Survey]) -> str | None:
    """The one format that all columns of dates have; None, the default, if there are several or none."""
    dated = [x for x in columns if x.has_dates]
    fitting = [form for form in DATE_FORMATS if all(x.has_dates_as(form) for x in dated)]
    return fitting[0] if len(fitting) == 1 else None


def _check_predicted(column: Survey) -> None:
    """Raise DataOptionError for a column to predict, chosen by its place, that has neither classes nor numbers."""
    advice = "name the column to predict, such as --set label=NAME or --set target=NAME"
    if column.has_other_notation:
        text = next(text for text in sorted(column.texts) if not column.notation.is_finite(text))
        expected = expected_number(column.notation, text)
        raise DataOptionError("label", f"found {quoted(text)} in {column.title}, {expected}; {advice}")
    if not column.numbers and column.has_too_many_texts:
        what = f"more than {MAX_CATEGORIES:,}" if len(column.texts) > MAX_CATEGORIES else len(column.texts)
        raise DataOptionError("label", f"found {what} different texts in {column.title}, expected classes; {advice}")
