"""The features of a table's rows: numbers, encoded categories, and values for empty cells, as in the training rows.

The rows are those of a file, or of a table in memory: a dict of columns, a list of dicts, or a DataFrame.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.core.array import type_with_article
from adtrain.data.csv_file import CsvOptions, Encoding, Opened
from adtrain.data.csv_table import cells_of
from adtrain.data.errors import DataError, printable, quoted, warn
from adtrain.data.file_array import require_memory
from adtrain.data.notation import SATURDAY, WEEK, YEAR, cleaned, date_text
from adtrain.data.part import Cells, Column, Columns, as_images
from adtrain.text import counted

PLACE = "rows"
"""The name of the table in messages: `rows:3` is the row 3, counted from 0."""

DATE_FEATURES = ("days", "week_sin", "week_cos", "year_sin", "year_cos")
"""What is appended to the name of a column of dates."""

ROWS = 4096
"""Rows whose features are set column by column, while these are in the processor's cache."""

BOOLEANS = ("False", "True")
"""Labels that are booleans, as texts."""
MISSING = ("NAType", "NaTType")
"""The types of pandas.NA and pandas.NaT, which are empty cells."""


@dataclass(frozen=True)
class TableEncoder:
    """Makes features of the cells that `csv_table` reads.

    A column of numbers is one feature. With `encoding` "one_hot" a column of categories is one feature for each
    category, 1 in the rows with that category and 0 in others. With "index" it is one feature, the category's number
    from 1. Rows with a category that the training rows do not have are 0 in all features of the column. A column of
    dates is five features, see `date_features`.

    Attributes:
        columns: with the categories of the training rows, in sorted order.
        fill: the features of empty cells, one number for each feature; empty if the training rows have no empty cells.
    """

    columns: Columns
    fill: tuple[float, ...]
    encoding: Encoding = "one_hot"

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, such as `width` or `city=Berlin`."""
        return tuple(name for column in self.columns.features for name in self._names(column))

    @property
    def indexed(self) -> tuple[bool, ...]:
        """For each feature, whether it is the number of a category."""
        return tuple(self.encoding == "index" and column.categories is not None for column in self.sources)

    @property
    def sources(self) -> tuple[Column, ...]:
        """For each feature, the column that it is made of."""
        return tuple(column for column in self.columns.features for _ in self._names(column))

    def width(self, column: Column) -> int:
        """The number of features of a column."""
        return len(self._names(column))

    def texts(self, features: np.ndarray) -> dict[str, str]:
        """What the columns, by name, have in a row (F,) of features; an empty text for an unknown category."""
        found, begin = {}, 0
        for column in self.columns.features:
            block = features[begin : begin + self.width(column)]
            begin += len(block)
            if column.is_date:
                found[column.title] = date_text(float(block[0]))
            elif column.categories is None:
                found[column.title] = f"{block[0]:.7g}"
            else:
                numbers = block if self.encoding == "index" else (block == 1) * np.arange(1, len(block) + 1)
                found[column.title] = ("", *column.categories)[int(numbers.sum())]
        return found

    def _names(self, column: Column) -> tuple[str, ...]:
        if column.is_date:
            return tuple(f"{column.title}.{name}" for name in DATE_FEATURES)
        if column.categories is None or self.encoding == "index":
            return (column.title,)
        return tuple(f"{column.title}={text}" for text in column.categories)

    def fits(self, options: CsvOptions, image_shape: tuple[int, ...]) -> bool:
        """Whether the encoder makes images of this shape, and fills empty cells exactly if the options say so."""
        width, columns = len(self.features), self.columns.features
        fill = width if options.missing in ("mean", "zero") else 0
        return (
            width == math.prod(image_shape)
            and (options.shape or (width, 1, 1)) == image_shape
            and len(self.fill) == fill
            and self.encoding == options.category_encoding
            and all(map(math.isfinite, self.fill))
            and all(0 <= column.position < self.columns.width for column in columns)
            and not any(column.is_date and column.categories is not None for column in columns)
            and len({column.name is None for column in columns}) == 1
        )

    def encode(self, cells: np.ndarray, columns: tuple[Column, ...], place: str) -> np.ndarray:
        """The features (N, features) of cells (N, columns) in the cells' type, with codes of categories of `columns`.

        Warns about categories that the training rows do not have, with one line for each column. `place` is the file.
        """
        if all(x.categories is None and not x.is_date for x in columns) and not np.isnan(cells).any():
            return cells
        nbytes = cells.itemsize * len(cells) * len(self.features)
        require_memory(place, nbytes, "; data.drop leaves out columns with many categories")
        features = np.zeros((len(cells), len(self.features)), cells.dtype)
        pairs = list(zip(self.columns.features, columns, strict=True))
        numbers = [_numbers(cells[:, i], *pair, place) for i, pair in enumerate(pairs)]
        for row in range(0, len(cells), ROWS):
            self._encode(cells[row : row + ROWS], numbers, features[row : row + ROWS])
        return features

    def _encode(self, cells: np.ndarray, numbers: Sequence[np.ndarray], features: np.ndarray) -> None:
        """Set the features of some rows, which are 0; `numbers` are those of `_numbers` for each column."""
        begin = 0
        for column, values, number in zip(self.columns.features, cells.T, numbers, strict=True):
            block = features[:, begin : begin + self.width(column)]
            empty = np.isnan(values)
            filled = np.flatnonzero(~empty)
            if column.is_date:
                block[filled] = date_features(values[filled])
            elif column.categories is None:
                block[:, 0] = values
                block[empty] = 0
            else:
                found = number[values[filled].astype(np.int64)]
                if self.encoding == "index":
                    block[filled, 0] = found
                else:
                    known = found > 0
                    block[filled[known], found[known] - 1] = 1
            if self.fill:
                block[empty] = self.fill[begin : begin + block.shape[1]]
            begin += block.shape[1]

    def images(self, cells: np.ndarray, columns: tuple[Column, ...], place: str, options: CsvOptions) -> np.ndarray:
        """The features as images: (N, F, 1, 1), or with `options.shape` (N, *shape), uint8 if all are pixels."""
        features = self.encode(cells, columns, place)
        if options.shape and options.missing != "mean":
            with np.errstate(invalid="ignore"):
                pixels = features.astype(np.uint8)
            features = pixels if np.array_equal(pixels, features) else features
        return np.asarray(as_images(features, place, options))


def learn(cells: np.ndarray, rows: np.ndarray, columns: Columns, options: CsvOptions, place: str) -> TableEncoder:
    """The encoder for the training rows, those at `rows` of `cells`, float64 (N, columns) with codes of categories.

    With the option `missing: mean` an empty cell gets the mean of each of its features over the training rows that are
    not empty, with `zero` 0; where categories are numbers, it gets 0. Raises DataError for a column without any value.
    """
    learnt, fill, mean = [], list[float](), options.missing == "mean"
    for i, column in enumerate(columns.features):
        if column.categories is None and not mean:
            learnt.append(column)
            fill += [0.0] * (len(DATE_FEATURES) if column.is_date else 1)
            continue
        values = cells[:, i].copy() if len(rows) == len(cells) else cells[rows, i]
        values = values[~np.isnan(values)]
        if mean and not len(values):
            reason = "found no value in the training rows, expected one for data.missing: mean; data.drop leaves it out"
            raise DataError(f"{place}: column {printable(column.title)}: {reason}")
        if column.categories is None:
            learnt.append(column)
            numbers = date_features(values) if column.is_date else values[:, np.newaxis]
            fill += numbers.mean(axis=0).tolist()
            continue
        counts = np.bincount(values.astype(np.int64)).tolist()
        by_text = sorted((column.categories[code], count) for code, count in enumerate(counts) if count)
        learnt.append(replace(column, categories=tuple(text for text, _ in by_text)))
        if options.category_encoding == "index":
            fill.append(0.0)
        else:
            fill += [count / len(values) if mean else 0.0 for _, count in by_text]
    if not fill:
        raise DataError(f"{place}: found no value in the columns of the training rows, expected features")
    filled = tuple(fill) if options.missing in ("mean", "zero") else ()
    return TableEncoder(replace(columns, features=tuple(learnt)), filled, options.category_encoding)


def date_features(days: np.ndarray) -> np.ndarray:
    """The features (N, 5) of dates, given as days since 2000: the days, and sine and cosine of two angles.

    They are the times since Monday, 0:00, as a part of the week, and since 1 January as a part of the mean year.
    """
    angles = [2 * np.pi * part for part in ((days + SATURDAY) / WEEK, days / YEAR)]
    return np.stack([days, *(f(angle) for angle in angles for f in (np.sin, np.cos))], axis=1)


def _numbers(values: np.ndarray, column: Column, found: Column, place: str) -> np.ndarray:
    """The number of each category of `found` from 1, or 0 with a warning for those that `column` does not have.

    `values` are indices into these categories, and NaN.
    """
    known = {text: number for number, text in enumerate(column.categories or (), 1)}
    texts = found.categories or ()
    numbers = np.array([known.get(text, 0) for text in texts], np.int64)
    codes = np.zeros(0, np.int64) if numbers.all() else values[~np.isnan(values)].astype(np.int64)
    if len(unseen := codes[numbers[codes] == 0]):
        others = len(np.unique(unseen)) - 1
        what = f"found {quoted(texts[unseen[0]])}{f' and {others:,} more' if others else ''}"
        where = f"in column {printable(column.title)} ({counted(len(unseen), 'rows')})"
        reason = "which no training row has: the column's features are 0"
        warn(place, f"{what} {where}, {reason}")
    return numbers


def is_rows(given: Any) -> bool:
    """Whether `given` is one of the forms that `rows_in_memory` takes or refuses by name, rather than an array."""
    is_list = isinstance(given, (list, tuple)) and len(given) > 0 and isinstance(given[0], Mapping)
    return isinstance(given, Mapping) or is_list or _is_frame(given) or _is_series(given)


def rows_in_memory(given: Any, options: CsvOptions, known: Columns) -> Cells:
    """The cells of the columns `known`, which `given` has by their names, or by their numbers if they have no names.

    None and NaN are empty cells. Raises DataError where a column is missing, or for a cell as `csv_table.read_rows`.
    """
    table = _named(given)
    for column in known.features:
        if column.title not in table:
            names = ", ".join(map(printable, table)) or "none"
            found = f"found no column {printable(column.title)}"
            raise DataError(f"{PLACE}: {found}, expected it as in training: the columns are {names}")
    titles = [column.title for column in known.features]
    texts = [[_text(value, column, options) for value in table[column.title]] for column in known.features]
    lines = ((i, list(row)) for i, row in enumerate(zip(*texts, strict=True)))
    named = replace(known, features=tuple(replace(column, name=column.title) for column in known.features))
    return cells_of(Opened(Path(PLACE), titles, True, lines), options, named)


def table_in_memory(given: Any, options: CsvOptions) -> Opened:
    """The table that `given` is, in one of the forms that `rows_in_memory` takes, with cells as in a CSV file.

    Raises DataError where it has no rows, or columns of different lengths or of one name.
    """
    table = _named(given)
    names = list(table)
    label = "label" if options.label is None else options.label

    def named(option: Sequence[str | int]) -> set[str | int]:
        """The names of the columns that an option gives, also by numbers."""
        return {names[x] if isinstance(x, int) and -len(names) <= x < len(names) else x for x in option}

    dates, labels = named(options.dates), named([label] if options.target is None else [])
    columns = [
        Column(name, i, BOOLEANS if name in labels else None, is_date=name in dates) for i, name in enumerate(names)
    ]
    texts = [[_text(value, column, options) for value in table[column.title]] for column in columns]
    if not any(texts):
        raise DataError(f"{PLACE}: found no rows, expected one for each example")
    lines = ((i, list(row)) for i, row in enumerate(zip(*texts, strict=True)))
    return Opened(Path(PLACE), names, True, lines, options.delimiter or ",")


def labels_in_memory(given: Any, label: str | int | None) -> Sequence[Any]:
    """The labels of such a table as they are: the column of a name, or of a number; by default `label`."""
    table = _named(given)
    return table[list(table)[label] if isinstance(label, int) else cleaned("label" if label is None else label)]


def csv_in_memory(given: Any, options: CsvOptions) -> bytes:
    """The same table as a CSV file."""
    table, text = table_in_memory(given, options), StringIO(newline="")
    csv.writer(text, delimiter=table.delimiter).writerows([table.first, *(row for _, row in table.lines)])
    return text.getvalue().encode()


def _named(given: Any) -> dict[str, Sequence[Any]]:
    """The columns by their names, which are compared without blanks around them."""
    table: dict[str, Sequence[Any]] = {}
    for name, values in _columns(given):
        if (text := cleaned(str(name))) in table:
            raise DataError(f"{PLACE}: found two columns named {printable(text)}, expected different names")
        table[text] = values
    return table


def _columns(given: Any) -> Iterable[tuple[Any, Sequence[Any]]]:
    """The names of the columns and their values, all of one length."""
    if _is_series(given):
        expected = "expected a table; frame.iloc[[i]] is the table of row i of a DataFrame"
        raise DataError(f"{PLACE}: found one row or column, a {type(given).__name__}, {expected}")
    if _is_frame(given):
        return [(name, list(given[name])) for name in given.columns]
    if isinstance(given, Mapping):
        for name, column in given.items():
            if isinstance(column, str) or not hasattr(column, "__len__"):
                found = f"found the value {column!r} of column {printable(str(name))}"
                raise DataError(f"{PLACE}: {found}, expected a list of values; write [row] to predict one row")
        lengths = {str(name): len(column) for name, column in given.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{PLACE}: found columns of different lengths {lengths}, expected one length")
        return given.items()
    names = list(given[0])
    for i, row in enumerate(given):
        if not isinstance(row, Mapping):
            raise DataError(f"{PLACE}:{i}: found {type_with_article(row)}, expected a dict as in row 0")
        if lacking := [name for name in names if name not in row]:
            raise DataError(f"{PLACE}:{i}: found no column {printable(str(lacking[0]))}, expected it as in row 0")
    return [(name, [row[name] for row in given]) for name in names]


def _is_frame(given: Any) -> bool:
    """Whether `given` is a DataFrame of pandas, or of a library with the same two attributes."""
    return hasattr(given, "columns") and hasattr(given, "__getitem__") and not isinstance(given, Mapping)


def _is_series(given: Any) -> bool:
    """Whether `given` is a row or a column of a DataFrame of pandas."""
    return not _is_frame(given) and all(hasattr(given, name) for name in ("keys", "iloc", "dtype"))


def _text(value: Any, column: Column, options: CsvOptions) -> str:
    """The cell as a CSV file would have it, with the options' decimal mark and format of dates.

    A number gets the sign of its column. A whole float is an integer where only that is a category. True is 1 in a
    column of numbers, and the category true in lower or upper case.
    """
    categories = column.categories
    if column.is_date and isinstance(value, np.datetime64):
        return "" if np.isnat(value) else _date_text(datetime.fromisoformat(str(value.astype("M8[us]"))), options)
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in MISSING:
        return ""
    if column.is_date and isinstance(value, date):
        return _date_text(value, options)
    if isinstance(value, bool):
        if categories is not None:
            return next((text for text in categories if text.lower() == str(value).lower()), str(value))
        value = int(value)
    text = (
        value if isinstance(value, str) else options.notation.written(value) if isinstance(value, float) else str(value)
    )
    if column.sign and not isinstance(value, str):
        return f"{text} {column.sign}"
    if categories is not None and isinstance(value, float) and value.is_integer() and text not in categories:
        return str(int(value))
    return text


def _date_text(value: date, options: CsvOptions) -> str:
    return str(value) if options.date_format is None else value.strftime(options.date_format)
