"""What a CSV or TSV table has in its columns, to propose options of reading it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from adtrain.data.csv_cells import MAX_CATEGORIES, NUMBER_LIKE, is_finite, is_plain
from adtrain.data.csv_file import opened
from adtrain.data.errors import DataError
from adtrain.data.options import Options

LABEL_NAMES = ("label", "class", "target", "y")
"""Names of the column to predict, in lower case; without one of them it is the last column."""

IDENTIFIERS = ("id", "index")
"""Names of columns that only number the rows, in lower case."""

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")

MOST_CLASSES = 20
"""Maximum different integers that are proposed as classes, and maximum texts as categories if none repeats."""


@dataclass(eq=False)
class Survey:
    """The cells of one column: `texts` are up to MAX_CATEGORIES + 1 different ones, `empty` says whether some are."""

    key: str | int
    cells: int = 0
    texts: set[str] = field(default_factory=set)
    numbers: bool = True
    integers: bool = True
    looks_numeric: bool = False
    decimal_commas: bool = True
    empty: bool = False

    def add(self, text: str) -> None:
        if not text:
            self.empty = True
            return
        self.cells += 1
        if len(self.texts) <= MAX_CATEGORIES:
            self.texts.add(text)
        self.numbers = self.numbers and is_plain(text) and is_finite(text)
        self.integers = self.numbers and self.integers and float(text).is_integer()
        self.decimal_commas = self.decimal_commas and DECIMAL_COMMA.fullmatch(text) is not None
        self.looks_numeric = self.looks_numeric or NUMBER_LIKE.match(text) is not None

    @property
    def has_too_many_texts(self) -> bool:
        """Whether there are more than MAX_CATEGORIES texts, or more than MOST_CLASSES and no text occurs twice."""
        return len(self.texts) > min(MAX_CATEGORIES, max(self.cells - 1, MOST_CLASSES))

    @property
    def has_classes(self) -> bool:
        return not self.numbers or (self.integers and len(self.texts) <= MOST_CLASSES)


def propose(path: Path, options: Options) -> dict[str, object]:
    """Keys of the data section with which the table can be read, in addition to those of the options.

    `label` or `target` is the column to predict. `drop` has columns with too many texts, such as names, and columns
    with identifiers. `categories` has columns with both numbers and texts. `missing` is mean if cells are empty. A
    column with numbers such as 1,5 is in none of them, so that reading it is an error.
    Raises DataError where the table cannot be read.
    """
    with opened(path, options, None) as table:
        columns = [Survey(name if table.header else i) for i, name in enumerate(table.first)]
        asked = options.label if options.target is None else options.target
        given = () if asked is None else asked if isinstance(asked, tuple) else (asked,)
        predicted = [columns[table.column("label", x)] for x in given]
        dropped = [columns[table.column("drop", x)] for x in options.drop]
        for line, row in table.lines:
            if len(row) != len(columns):
                raise DataError(f"{path}:{line}: found {len(row)} values, expected {len(columns)} as in the first line")
            for column, cell in zip(columns, row, strict=True):
                column.add(cell.strip())
        found: dict[str, object] = {"header": table.header}
    columns = [column for column in columns if column not in dropped]
    if not predicted:
        named = [column for column in columns if str(column.key).lower() in LABEL_NAMES]
        predicted = [named[0] if named else columns[-1]]
        found["label" if predicted[0].has_classes else "target"] = predicted[0].key
    features = [column for column in columns if column not in predicted]
    identifiers = [column.key for column in features if str(column.key).lower() in IDENTIFIERS]
    texts = [column for column in features if not column.numbers and column.key not in identifiers]
    texts = [column for column in texts if not column.decimal_commas]
    many = [column.key for column in texts if column.has_too_many_texts]
    mixed = [column.key for column in texts if column.looks_numeric and column.key not in many]
    for option, keys in (("drop", many + identifiers), ("categories", mixed)):
        if keys:
            found[option] = [*getattr(options, option), *keys]
    if any(column.empty for column in features) and options.missing == "error":
        found["missing"] = "mean"
    return found
