"""Options of reading files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Missing = Literal["error", "mean", "zero", "drop"]
Encoding = Literal["one_hot", "index"]
FileFormat = Literal["text", "csv"]
Unit = Literal["character", "byte"]

MISSING_VALUES = ("NA", "N/A", "#N/A", "<NA>", "NaN", "NaT", "null", "None", "?", "-", ".")
"""Texts that other programs write for a missing value."""


@dataclass(frozen=True)
class Options:
    """The options of `data.load`; `formats` says which formats take which of them.

    Attributes:
        test_path: a second file or folder of the same format, with the test part.
        test: the fraction of the examples held out as the test part, if the files have none.
        label: the column of the labels: its name, or its index from 0, or from -1 backwards.
        target: the columns of numbers to predict, by name or index, instead of `label`.
        delimiter: the character between two columns; None for a tab in .tsv files and a comma in others.
        drop: the columns that are not read, by name or index.
        categories: the columns whose values are categories even if they look like numbers.
        category_encoding: a column of categories becomes a feature for each (`one_hot`), or their number (`index`).
        missing: what to do with an empty cell: `error`; `mean` or `zero` fill it; `drop` leaves out its row.
        missing_values: the texts of empty cells, beside a cell without any text; upper and lower case are equal.
        header: whether the first line names the columns; None to detect it.
        shape: (C, H, W) of images stored as flat rows; it also tells (N, C, H, W) from (N, H, W, C).
        image_size: (height, width) to resize all images to; None if they have the same size.
        channels: 1 for grey, 3 for colour; None for 3 if any image is in colour, otherwise 1.
        skip_broken: skip images that cannot be read, with a warning for each.
        format: "text" and "csv" read a file as a text or table whatever its name; None to detect the format.
        length: the number of characters or bytes in an input sequence of a text.
        unit: what a class of a text is.
    """

    test_path: str | None = None
    test: float = 0.0
    label: str | int | None = None
    target: str | int | tuple[str | int, ...] | None = None
    header: bool | None = None
    delimiter: str | None = None
    drop: tuple[str | int, ...] = ()
    categories: tuple[str | int, ...] = ()
    category_encoding: Encoding = "one_hot"
    missing: Missing = "error"
    missing_values: tuple[str, ...] = MISSING_VALUES
    shape: tuple[int, int, int] | None = None
    image_size: tuple[int, int] | None = None
    channels: int | None = None
    skip_broken: bool = False
    format: FileFormat | None = None
    length: int = 128
    unit: Unit = "character"

    @property
    def given(self) -> list[str]:
        """The names of the options that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
