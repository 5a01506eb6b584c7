"""Rows of a table in memory: a dict of columns, a list of dicts, or a DataFrame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adtrain.data.columns import Columns, cleaned, printable
from adtrain.data.csv_file import Opened
from adtrain.data.csv_table import Cells, cells_of
from adtrain.data.errors import DataError
from adtrain.data.options import Options

PLACE = "rows"
"""The name of the table in messages: `rows:3` is the row 3, counted from 0."""

MISSING = ("NAType", "NaTType")
"""The types of pandas.NA and pandas.NaT, which are empty cells."""


def is_table(given: Any) -> bool:
    """Whether `given` is one of the forms that `read` takes, rather than an array."""
    is_list = isinstance(given, (list, tuple)) and len(given) > 0 and isinstance(given[0], Mapping)
    return isinstance(given, Mapping) or is_list or _is_frame(given)


def read(given: Any, options: Options, known: Columns) -> Cells:
    """The cells of the columns `known`, which `given` has by their names, or by their numbers if they have no names.

    None and NaN are empty cells. Raises DataError where a column is missing, or for a cell as `csv_table.read_rows`.
    """
    table: dict[str, Sequence[Any]] = {}
    for name, values in _columns(given):
        if (text := cleaned(str(name))) in table:
            raise DataError(f"{PLACE}: found two columns named {printable(text)}, expected different names")
        table[text] = values
    for column in known.features:
        if column.title not in table:
            names = ", ".join(map(printable, table)) or "none"
            found = f"found no column {printable(column.title)}"
            raise DataError(f"{PLACE}: {found}, expected it as in training: the columns are {names}")
    titles = [column.title for column in known.features]
    texts = [[_text(value, column.categories) for value in table[column.title]] for column in known.features]
    lines = ((i, list(row)) for i, row in enumerate(zip(*texts, strict=True)))
    named = replace(known, features=tuple(replace(column, name=column.title) for column in known.features))
    return cells_of(Opened(Path(PLACE), titles, True, lines), options, named)


def _columns(given: Any) -> Iterable[tuple[Any, Sequence[Any]]]:
    """The names of the columns and their values, all of one length."""
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
            raise DataError(f"{PLACE}:{i}: found a {type(row).__name__}, expected a dict as in row 0")
        if lacking := [name for name in names if name not in row]:
            raise DataError(f"{PLACE}:{i}: found no column {printable(str(lacking[0]))}, expected it as in row 0")
    return [(name, [row[name] for row in given]) for name in names]


def _is_frame(given: Any) -> bool:
    """Whether `given` is a DataFrame of pandas, or of a library with the same two attributes."""
    return hasattr(given, "columns") and hasattr(given, "__getitem__") and not isinstance(given, Mapping)


def _text(value: Any, categories: tuple[str, ...] | None) -> str:
    """The cell as a CSV file would have it. A whole float is an integer where only that is a category; True is 1 in a
    column of numbers, and the category true in lower or upper case."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in MISSING:
        return ""
    if isinstance(value, bool):
        if categories is None:
            return str(int(value))
        return next((text for text in categories if text.lower() == str(value).lower()), str(value))
    text = value if isinstance(value, str) else repr(value) if isinstance(value, float) else str(value)
    if categories is not None and isinstance(value, float) and value.is_integer() and text not in categories:
        return str(int(value))
    return text
