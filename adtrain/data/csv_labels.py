"""The labels of a table, or the numbers to predict: which columns have them, and their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from adtrain.data.columns import Columns, cleaned, quoted
from adtrain.data.csv_cells import Missing, is_finite, is_number, is_plain
from adtrain.data.csv_file import Line, Opened
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""The one way to write an integer below 10^18: texts of different labels differ."""


class LabelReader:
    """Reads the labels of a table from one column, or targets from one or several, chunk by chunk.

    `columns` are the indices of these columns, from 0. Raises DataOptionError where an option names no column.
    """

    def __init__(self, table: Opened, options: Options) -> None:
        self._table, self._texts, self._numbers = table, list[str](), list[np.ndarray]()
        self._missing = Missing(options)
        self.are_targets = options.target is not None
        self.columns = _target_columns(table, options.target) if self.are_targets else [_label_column(table, options)]

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of the columns; without a header `column 3`."""
        return tuple(self._table.name(i) or f"column {i}" for i in self.columns)

    @property
    def have_numbers(self) -> bool:
        """Whether all values so far are numbers."""
        return self.are_targets or all(map(is_number, self._texts))

    def add(self, chunk: Sequence[Line], keep: np.ndarray) -> None:
        """Check the labels of all lines, and keep those at the indices `keep`. Raises DataError with their position."""
        if self.are_targets:
            self._numbers.append(_targets(self._table, chunk, self.columns, self._missing)[keep])
        else:
            texts = _label_texts(self._table, chunk, self.columns[0], self._missing)
            self._texts += [texts[i] for i in keep]

    def labels(self) -> np.ndarray:
        """The targets, float64 (N, targets), or the labels (N,), as texts or in the type that all are written in.

        These types are integers, booleans (True and False), and floats whose fractions are 0, such as 2.0.
        Raises DataOptionError where all labels are numbers and one is a fraction.
        """
        if self.are_targets:
            return np.concatenate(self._numbers)
        if all(map(INTEGER.fullmatch, self._texts)):
            return np.array(list(map(int, self._texts)), np.int64)
        if set(self._texts) <= {"False", "True"}:
            return np.array(self._texts) == "True"
        if all(is_plain(text) and is_finite(text) for text in self._texts):
            fraction = next((text for text in self._texts if not float(text).is_integer()), None)
            if fraction is not None:
                column, path = self.columns[0], self._table.path
                found = f"found {fraction[:40]} in {self._table.title(column)} of {path}, expected classes"
                name = self._table.name(column)
                advice = f"data.target: {column if name is None else name}, and a loss such as mse"
                raise DataOptionError("label", f"{found}; to predict numbers, set {advice}")
            if all(str(float(text)) == text for text in self._texts):
                return np.array(self._texts, np.float64)
        return np.array(self._texts)


def columns_at_end(options: Options, known: Columns) -> int:
    """The number of columns of labels or targets, if they are known by number and the last ones; otherwise 0."""
    target = options.label if options.target is None else options.target
    given = target if isinstance(target, tuple) else (target,)
    found = {column % known.width for column in given if isinstance(column, int)}
    begin = known.width - len(given)
    features_before = all(column.position < begin for column in known.features)
    return len(given) if found == set(range(begin, known.width)) and features_before else 0


def _label_column(table: Opened, options: Options) -> int:
    if options.label is not None:
        return table.column("label", options.label)
    if table.header and "label" in table.positions:
        return table.column("label", "label")
    expected = f"expected the name of the column of {table.path} with the classes"
    raise DataOptionError("label", f"missing, {expected}; to predict numbers, set data.target; {table.listed()}")


def _target_columns(table: Opened, target: str | int | tuple[str | int, ...] | None) -> list[int]:
    given = target if isinstance(target, tuple) else () if target is None else (target,)
    columns = [table.column("target", column) for column in given]
    if len(set(columns)) < len(columns):
        raise DataOptionError("target", f"found {list(given)}, expected each column once")
    if len(columns) == len(table.first):
        found = f"found all {len(table.first)} columns of {table.path}"
        raise DataOptionError("target", f"{found}, expected at least one other column")
    return columns


def _label_texts(table: Opened, chunk: Sequence[Line], label: int, missing: Missing) -> list[str]:
    texts = [cleaned(row[label]) for _, row in chunk]
    if empty := {text for text in set(texts) if text in missing}:
        (line, _), text = next(x for x in zip(chunk, texts, strict=True) if x[1] in empty)
        raise _empty(table, line, label, text, "a label")
    return texts


def _empty(table: Opened, line: int, column: int, text: str, expected: str) -> DataError:
    found = f"found {quoted(text) if text else 'no value'} in {table.title(column)}"
    stands = " which stands for a missing value unless data.missing_values says otherwise," if text else ""
    return DataError(f"{table.path}:{line}: {found},{stands} expected {expected}")


def _targets(table: Opened, chunk: Sequence[Line], columns: Sequence[int], missing: Missing) -> np.ndarray:
    """The numbers of these columns, float64 (lines, columns); each is finite in float32."""
    rows = [[cleaned(row[i]) for i in columns] for _, row in chunk]
    if all(map(is_plain, map("".join, rows))) and not missing.numbers:
        with suppress(ValueError), np.errstate(over="ignore"):
            numbers = np.array(rows, np.float64)
            if np.isfinite(numbers.astype(np.float32)).all():
                return numbers
    for (line, _), row in zip(chunk, rows, strict=True):
        for column, text in zip(columns, row, strict=True):
            if text in missing:
                raise _empty(table, line, column, text, "a finite number")
            if not (is_plain(text) and is_finite(text)):
                where = f"{table.path}:{line}: found {quoted(text)} in {table.title(column)}"
                raise DataError(f"{where}, expected a finite number")
    return np.array(rows, np.float64)
