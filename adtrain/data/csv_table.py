"""CSV and TSV tables: one line per example; one column holds the labels, or some the numbers to predict."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.data.columns import Column, Columns, printable
from adtrain.data.csv_cells import CellReader
from adtrain.data.csv_file import Opened, opened
from adtrain.data.csv_labels import LabelReader, columns_at_end
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options
from adtrain.data.part import Part, Parts
from adtrain.text import visible

CHUNK_ROWS = 1024

_log = logging.getLogger(__name__)


class Cells(NamedTuple):
    """The cells of a table's columns with features as float64 (N, columns), see `CellReader`.

    `rows` are the indices of the N rows among all rows of the file.
    """

    values: np.ndarray
    columns: tuple[Column, ...]
    rows: np.ndarray


def read(path: Path, options: Options, known: Columns | None = None) -> Parts:
    """The table as one part: labels or targets, and the cells of the other columns, float64 (N, columns, 1, 1).

    `CellReader` says what the cells are; `TableEncoder` makes features or images of them. Labels with equal texts are
    equal. `LabelReader.labels` says which types they have. Targets are float64 (N, targets). `csv_file.opened` says
    whether the first line is a header. `known` are the columns of the training part: these are read, at whatever
    position the header has them.
    Raises DataError with line and column, and DataOptionError if a column that an option names is missing or unknown,
    or if the labels are fractions.
    """
    with opened(path, options, known) as table:
        labels = LabelReader(table, options)
        columns = _chosen(table, labels, options) if known is None else _found(table, known, 0)
        cells = _cells(table, columns, labels, options, known is None)
        if known is None and options.header is None and not _has_evident_header(table, cells, labels, options):
            reason = (
                f"expected true or false: no column of {path} has numbers, which would tell whether line 1 has names"
            )
            raise DataOptionError("header", f"missing, {reason}")
        width = len(table.first)
    images = cells.values.reshape(*cells.values.shape, 1, 1)
    return Parts(Part(images, labels.labels(), str(path), Columns(cells.columns, width), labels.target_names))


def read_rows(path: Path, options: Options, known: Columns) -> Cells:
    """The cells of the columns `known` in a table that needs no labels. Raises DataError with line and column."""
    with opened(path, options, known) as table:
        return cells_of(table, options, known)


def cells_of(table: Opened, options: Options, known: Columns) -> Cells:
    """The cells of the columns `known` in an open table; see `read_rows`."""
    return _cells(table, _found(table, known, columns_at_end(options, known)), None, options, False)


def _chosen(table: Opened, labels: LabelReader, options: Options) -> list[Column]:
    """The columns with features according to the options; those listed in `categories` have no categories yet."""
    dropped = {table.column("drop", column) for column in options.drop}
    listed = {table.column("categories", column) for column in options.categories}
    for option, indices in (("drop", dropped), ("categories", listed)):
        if both := indices & set(labels.columns):
            what = "a column of the targets" if labels.are_targets else "the column of the labels"
            raise DataOptionError(option, f"found {what}, {table.title(min(both))}")
    if both := dropped & listed:
        raise DataOptionError("drop", f"found {table.title(min(both))}, which data.categories lists too")
    if listed and options.shape:
        raise DataOptionError("categories", "found together with data.shape, whose columns are the pixels of an image")
    predicted = set(labels.columns)
    columns = []
    for i in range(len(table.first)):
        if i not in predicted and i not in dropped:
            columns.append(Column(table.name(i), i, () if i in listed else None))
    if not columns:
        what = "targets" if labels.are_targets else "labels"
        raise DataOptionError("drop", f"found all columns but the {what}, expected one that stays: {table.listed()}")
    for name, positions in table.positions.items():
        if len(kept := [i for i in positions if i not in dropped]) > 1 and not predicted.issuperset(kept):
            found = f"found two columns named {printable(name)}, {kept[0]} and {kept[1]}"
            raise DataError(f"{table.path}:1: {found}, expected different names; data.drop takes the number of one")
    return columns


def _found(table: Opened, known: Columns, fewer: int) -> list[Column]:
    """The known columns with their positions in this table; without a header, the last `fewer` may be missing."""
    if not table.header:
        if len(table.first) not in (known.width, known.width - fewer):
            reason = f"found {len(table.first)} columns, expected {known.width} as in training, without a header"
            raise DataError(f"{table.path}: {reason}")
        return list(known.features)
    columns = []
    for column in known.features:
        found = table.positions.get(str(column.name), [])
        if len(found) != 1:
            name = printable(str(column.name))
            if found:
                raise DataError(f"{table.path}:1: found two columns named {name}, expected one")
            raise DataError(f"{table.path}:1: found no column {name}, expected it as in training: {table.listed()}")
        columns.append(replace(column, position=found[0]))
    return columns


def _cells(
    table: Opened, columns: Sequence[Column], labels: LabelReader | None, options: Options, learning: bool
) -> Cells:
    """The cells of these columns, and of the same rows the labels, into `labels`.

    With `missing: drop` without the rows that have empty cells.
    """
    reader = CellReader(table.path, columns, learning and not options.shape, options)
    chunks: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    count, first_dropped = 0, 0
    while chunk := list(islice(table.lines, CHUNK_ROWS)):
        for i, (line, row) in enumerate(chunk):
            if len(row) != len(table.first):
                chunk[i] = line, table.row(line, row)
        values = reader.convert([line for line, _ in chunk], [[row[x.position] for x in columns] for _, row in chunk])
        empty = np.isnan(values).any(axis=1) & (options.missing == "drop")
        if empty.any() and not first_dropped:
            first_dropped = chunk[int(empty.argmax())][0]
        keep = np.flatnonzero(~empty)
        chunks.append(values[keep])
        kept.append(count + keep)
        if labels is not None:
            labels.add(chunk, keep)
        count += len(chunk)
    reader.warn()
    rows = np.concatenate([np.zeros(0, np.int64), *kept])
    if first_dropped:
        what = f"{count - len(rows):,} of {count:,} rows with an empty cell, the first in line {first_dropped}"
        _log.warning("adtrain: warning: %s: left out %s", visible(str(table.path)), what)
    if not len(rows):
        found = f"an empty cell in each of {count:,} rows" if count else "no rows"
        raise DataError(f"{table.path}: found {found}, expected one per example")
    return Cells(np.concatenate(chunks), reader.columns, rows)


def _has_evident_header(table: Opened, cells: Cells, labels: LabelReader, options: Options) -> bool:
    """Whether a header was detected by more than the absence of numbers in the first of many lines of texts."""
    named = [options.label, *options.drop, *options.categories]
    has_numbers = any(column.categories is None for column in cells.columns) or labels.have_numbers
    return not table.header or has_numbers or options.label is None or any(isinstance(x, str) for x in named)
