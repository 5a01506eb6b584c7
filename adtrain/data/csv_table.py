"""CSV and TSV tables: one line per example; one column holds the labels."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.data.columns import Column, Columns, printable
from adtrain.data.csv_cells import CellReader, column_title, is_number
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options
from adtrain.data.part import Part, Parts
from adtrain.files import open_regular
from adtrain.text import visible

CHUNK_ROWS = 1024
MAX_LISTED = 12
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""The one way to write an integer below 10^18: texts of different labels differ."""

Line = tuple[int, list[str]]
"""The number of a line in the file, and its values."""

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """An open table: its first line, whether that has the names of the columns, and the lines with values."""

    path: Path
    first: list[str]
    header: bool
    lines: Iterator[Line]

    def name(self, column: int) -> str | None:
        return self.first[column] if self.header else None

    def listed(self) -> str:
        """The columns, for messages."""
        if not self.header:
            return f"there is no header, the columns are 0 to {len(self.first) - 1}"
        more = ", ..." if len(self.first) > MAX_LISTED else ""
        return f"the columns are {', '.join(map(printable, self.first[:MAX_LISTED]))}{more}"


class Cells(NamedTuple):
    """The cells of a table's columns with features as float32 (N, columns), see `CellReader`.

    `labels` are the texts of the labels, if there is a column of labels. `rows` are the indices of the N rows among all
    rows of the file.
    """

    values: np.ndarray
    columns: tuple[Column, ...]
    labels: list[str]
    rows: np.ndarray


def read(path: Path, options: Options, known: Columns | None = None) -> Parts:
    """The table as one part: labels from one column, and the cells of the other ones, float32 (N, columns, 1, 1).

    `CellReader` says what the cells are; `TableEncoder` makes features or images of them. Labels are equal if their
    texts are; they become integers if all are written as such, without a sign + or leading zeros. By default the first
    line is a header if none of its values is a number. With the columns `known` of the training part, those are
    read, wherever the header has them. Raises DataError with line and column, and DataOptionError if a column that an
    option names is missing or unknown.
    """
    with _opened(path, options, known) as table:
        label = _label_column(path, options.label, table)
        columns = _chosen(table, label, options) if known is None else _found(table, known, 0)
        cells = _cells(table, columns, label, options, known is None)
        if known is None and options.header is None and not _has_evident_header(table, cells, options):
            reason = (
                f"expected true or false: no column of {path} has numbers, which would tell whether line 1 has names"
            )
            raise DataOptionError("header", f"missing, {reason}")
        width = len(table.first)
    images = cells.values.reshape(*cells.values.shape, 1, 1)
    return Parts(Part(images, _labels(cells.labels), str(path), Columns(cells.columns, width)))


def read_rows(path: Path, options: Options, known: Columns) -> Cells:
    """The cells of the columns `known` in a table that needs no labels. Raises DataError with line and column."""
    with _opened(path, options, known) as table:
        last = known.width - 1
        without_label = options.label in (-1, last) and all(column.position < last for column in known.features)
        return _cells(table, _found(table, known, int(without_label)), None, options, False)


@contextmanager
def _opened(path: Path, options: Options, known: Columns | None) -> Iterator[Opened]:
    """The open table. Errors of reading the file during the `with` block become DataError."""
    delimiter = options.delimiter or ("\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True, delimiter=delimiter)
            lines = ((reader.line_num, row) for row in reader if row)
            try:
                line, first = next(lines, (0, list[str]()))
                if len(first) < 2 and (known is None or not first):
                    separated = {",": "commas", "\t": "tabs"}.get(delimiter, repr(delimiter))
                    advice = f"separated by {separated}; data.delimiter sets another separator"
                    raise DataError(f"{path}: found {len(first)} columns, expected at least 2, {advice}")
                if known is not None:
                    header = known.features[0].name is not None
                else:
                    header = options.header if options.header is not None else not any(map(is_number, first))
                values = lines if header else chain([(line, list(first))], lines)
                yield Opened(path, [name.strip() for name in first] if header else first, header, values)
            except csv.Error as error:
                raise DataError(f"{path}:{reader.line_num}: found invalid CSV ({error}), expected a table") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: found an invalid byte at {error.start}, expected UTF-8 text") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _label_column(path: Path, label: str | int | None, table: Opened) -> int:
    """The index of the labels' column, from 0."""
    if label is None:
        if table.header and "label" in table.first:
            return table.first.index("label")
        raise DataOptionError("label", f"missing, expected the column of {path} with the labels: {table.listed()}")
    return _column(table, "label", label)


def _column(table: Opened, option: str, column: str | int) -> int:
    """The index, from 0, of a column that an option names."""
    if isinstance(column, int) and -len(table.first) <= column < len(table.first):
        return column % len(table.first)
    if table.header and isinstance(column, str) and column in table.first:
        return table.first.index(column)
    raise DataOptionError(option, f"found {column!r}, which is no column of {table.path}: {table.listed()}")


def _chosen(table: Opened, label: int, options: Options) -> list[Column]:
    """The columns with features according to the options; those listed in `categories` have no categories yet."""
    dropped = {_column(table, "drop", column) for column in options.drop}
    listed = {_column(table, "categories", column) for column in options.categories}
    for option, indices in (("drop", dropped), ("categories", listed)):
        if label in indices:
            raise DataOptionError(option, f"found the column of the labels, {_title(table, label)}")
    if both := dropped & listed:
        raise DataOptionError("drop", f"found {_title(table, min(both))}, which data.categories lists too")
    if listed and options.shape:
        raise DataOptionError("categories", "found together with data.shape, whose columns are the pixels of an image")
    columns = []
    for i in range(len(table.first)):
        if i != label and i not in dropped:
            columns.append(Column(table.name(i), i, () if i in listed else None))
    if not columns:
        raise DataOptionError("drop", f"found all columns but the labels, expected one that stays: {table.listed()}")
    names = [column.name for column in columns if column.name is not None]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{table.path}:1: found two columns named {printable(twice)}, expected different names")
    return columns


def _found(table: Opened, known: Columns, fewer: int) -> list[Column]:
    """The known columns with their positions in this table; without a header, `fewer` columns may be missing."""
    if not table.header:
        if not known.width - fewer <= len(table.first) <= known.width:
            reason = f"found {len(table.first)} columns, expected {known.width} as in training, without a header"
            raise DataError(f"{table.path}: {reason}")
        return list(known.features)
    columns = []
    for column in known.features:
        if column.name not in table.first:
            name = printable(str(column.name))
            raise DataError(f"{table.path}:1: found no column {name}, expected it as in training: {table.listed()}")
        if table.first.count(column.name) > 1:
            raise DataError(f"{table.path}:1: found two columns named {printable(column.name)}, expected one")
        columns.append(Column(column.name, table.first.index(column.name), column.categories))
    return columns


def _cells(table: Opened, columns: Sequence[Column], label: int | None, options: Options, learning: bool) -> Cells:
    """The cells of these columns, and the labels; with `missing: drop` without the rows that have empty cells."""
    reader = CellReader(table.path, columns, learning and not options.shape, options.missing != "error")
    chunks: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    labels: list[str] = []
    count, first_dropped = 0, 0
    while chunk := list(islice(table.lines, CHUNK_ROWS)):
        _check_widths(table, chunk)
        texts = [] if label is None else _label_texts(table, chunk, label)
        values = reader.convert([line for line, _ in chunk], [[row[x.position] for x in columns] for _, row in chunk])
        empty = np.isnan(values).any(axis=1) & (options.missing == "drop")
        if empty.any() and not first_dropped:
            first_dropped = chunk[int(empty.argmax())][0]
        keep = np.flatnonzero(~empty)
        chunks.append(values[keep])
        kept.append(count + keep)
        labels += [texts[i] for i in keep] if texts else []
        count += len(chunk)
    rows = np.concatenate([np.zeros(0, np.int64), *kept])
    if first_dropped:
        what = f"{count - len(rows):,} of {count:,} rows with an empty cell, the first in line {first_dropped}"
        _log.warning("adtrain: %s: left out %s", visible(str(table.path)), what)
    if not len(rows):
        found = f"an empty cell in each of {count:,} rows" if count else "no rows"
        raise DataError(f"{table.path}: found {found}, expected one per example")
    return Cells(np.concatenate(chunks), reader.columns, labels, rows)


def _check_widths(table: Opened, chunk: Sequence[Line]) -> None:
    for line, row in chunk:
        if len(row) != len(table.first):
            found = f"found {len(row)} values, expected {len(table.first)} as in the first line"
            raise DataError(f"{table.path}:{line}: {found}")


def _label_texts(table: Opened, chunk: Sequence[Line], label: int) -> list[str]:
    texts = [row[label].strip() for _, row in chunk]
    if "" in texts:
        where = f"{table.path}:{chunk[texts.index('')][0]}"
        raise DataError(f"{where}: found no value in {_title(table, label)}, expected a label")
    return texts


def _has_evident_header(table: Opened, cells: Cells, options: Options) -> bool:
    """Whether a header was detected by more than the absence of numbers in the first of many lines of texts."""
    named = [options.label, *options.drop, *options.categories]
    has_numbers = any(column.categories is None for column in cells.columns) or all(map(is_number, cells.labels))
    return not table.header or has_numbers or options.label is None or any(isinstance(x, str) for x in named)


def _labels(texts: list[str]) -> np.ndarray:
    return np.array(list(map(int, texts)), np.int64) if all(map(INTEGER.fullmatch, texts)) else np.array(texts)


def _title(table: Opened, column: int) -> str:
    return column_title(column, table.name(column))
