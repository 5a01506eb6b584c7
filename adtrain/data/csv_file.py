"""An open CSV or TSV file: its header and its lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from adtrain.data.columns import Columns, printable
from adtrain.data.csv_cells import column_title, is_number
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options
from adtrain.files import open_regular
from adtrain.text import first_names

MAX_LISTED = 12

Line = tuple[int, list[str]]
"""The number of a line in the file, and its values."""


class Opened(NamedTuple):
    """An open table: its first line, whether that has the names of the columns, and the lines with values."""

    path: Path
    first: list[str]
    header: bool
    lines: Iterator[Line]

    def name(self, column: int) -> str | None:
        return self.first[column] if self.header else None

    def title(self, column: int) -> str:
        """The column for messages, such as `column 1 (width)`."""
        return column_title(column, self.name(column))

    def listed(self) -> str:
        """The columns, for messages."""
        if not self.header:
            return f"there is no header, the columns are 0 to {len(self.first) - 1}"
        return f"the columns are {first_names(list(map(printable, self.first)), MAX_LISTED)}"

    def column(self, option: str, given: str | int) -> int:
        """The index, from 0, of a column that an option names. Raises DataOptionError if there is no such column."""
        if isinstance(given, int) and -len(self.first) <= given < len(self.first):
            return given % len(self.first)
        if self.header and isinstance(given, str) and given in self.first:
            return self.first.index(given)
        raise DataOptionError(option, f"found {given!r}, which is not a column of {self.path}: {self.listed()}")


@contextmanager
def opened(path: Path, options: Options, known: Columns | None) -> Iterator[Opened]:
    """The open table. Errors of reading the file during the `with` block become DataError.

    By default the first line is a header if none of its values is a number, or if the columns `known` have names.
    """
    delimiter = options.delimiter or ("\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True, delimiter=delimiter)
            lines = ((reader.line_num, row) for row in reader if row)
            try:
                line, first = next(lines, (0, list[str]()))
                if len(first) < 2 and (known is None or not first):
                    separated = {",": "commas", "\t": "tabs"}.get(delimiter, repr(delimiter))
                    other = next((repr(x) for x in ";,\t|" if first and x in first[0]), "another separator")
                    advice = f"separated by {separated}; set data.delimiter to {other}"
                    if not first:
                        raise DataError(f"{path}: found no lines, expected one for each example")
                    raise DataError(f"{path}: found 1 column, expected at least 2, {advice}")
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
