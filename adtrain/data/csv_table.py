"""CSV tables: one line per example; one column holds the labels."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options
from adtrain.data.part import Part, Parts, as_images
from adtrain.files import open_regular

if TYPE_CHECKING:
    from _csv import Reader

CHUNK_ROWS = 1024
MAX_LISTED = 12
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""The one way to write an integer below 10^18: texts of different labels differ."""


def read(path: Path, options: Options) -> Parts:
    """The table as one part: labels from one column, float32 features (N, F, 1, 1) from all others.

    With `options.shape` the features are images (N, *shape), uint8 if all values are integers from 0 to 255. Labels are
    equal if their texts are; they become integers if all are written as such, without a sign + or leading zeros. By
    default the first line is a header if none of its values is a number. Raises DataError with line and column, and
    DataOptionError if the column of the labels is missing or unknown.
    """
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            try:
                return Parts(_table(path, reader, options))
            except csv.Error as error:
                raise DataError(f"{path}:{reader.line_num}: found invalid CSV ({error}), expected a table") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: found an invalid byte at {error.start}, expected UTF-8 text") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _table(path: Path, reader: Reader, options: Options) -> Part:
    rows = ((reader.line_num, row) for row in reader if row)
    line, first = next(rows, (0, list[str]()))
    if len(first) < 2:
        raise DataError(f"{path}: found {len(first)} columns, expected at least 2, separated by commas")
    header = options.header if options.header is not None else not any(map(_is_number, first))
    names = first if header else None
    label = _label_column(path, options.label, first, header)
    chunks: list[np.ndarray] = []
    labels: list[str] = []
    remaining = rows if header else chain([(line, list(first))], rows)
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        features = []
        for line, row in chunk:
            if len(row) != len(first):
                raise DataError(f"{path}:{line}: found {len(row)} values, expected {len(first)} as in the first line")
            labels.append(row.pop(label).strip())
            if not labels[-1]:
                raise DataError(f"{path}:{line}: found no value in column {_name(label, names)}, expected a label")
            features.append(row)
        chunks.append(_numbers(path, [line for line, _ in chunk], features, label, names))
    if not chunks:
        raise DataError(f"{path}: found no rows, expected one per example")
    numbers = np.concatenate(chunks)
    images = as_images(_as_pixels(numbers) if options.shape else numbers, str(path), options)
    named = names is not None and images.shape[1:] == (numbers.shape[1], 1, 1)
    feature_names = tuple(name for i, name in enumerate(first) if i != label) if named else ()
    return Part(images, _labels(labels), str(path), feature_names)


def _label_column(path: Path, label: str | int | None, first: Sequence[str], header: bool) -> int:
    """The index of the labels' column, from 0."""
    listed = ", ".join(map(_printable, first[:MAX_LISTED])) + (", ..." if len(first) > MAX_LISTED else "")
    columns = f"the columns are {listed}" if header else f"there is no header, the columns are 0 to {len(first) - 1}"
    if label is None:
        if header and "label" in first:
            return first.index("label")
        raise DataOptionError("label", f"missing, expected the column of {path} with the labels: {columns}")
    if isinstance(label, int) and -len(first) <= label < len(first):
        return label % len(first)
    if header and isinstance(label, str) and label in first:
        return first.index(label)
    raise DataOptionError("label", f"found {label!r}, which is no column of {path}: {columns}")


def _numbers(
    path: Path, lines: Sequence[int], rows: list[list[str]], label: int, names: Sequence[str] | None
) -> np.ndarray:
    """The features of a chunk of rows as float32 (rows, features). Raises DataError for the first invalid value."""
    if all(map(_is_plain, map("".join, rows))):
        with suppress(ValueError), np.errstate(over="ignore"):
            numbers = np.array(rows, np.float32)
            if np.isfinite(numbers).all():
                return numbers
    for line, row in zip(lines, rows, strict=True):
        for i, text in enumerate(row):
            if not (_is_plain(text) and _is_finite(text)):
                where, column = f"{path}:{line}", _name(i + (i >= label), names)
                raise DataError(f"{where}: found {text[:40]!r} in column {column}, expected a finite number")
    raise AssertionError(f"{path}: NumPy cannot convert a chunk in which every value is a finite number")


def _as_pixels(numbers: np.ndarray) -> np.ndarray:
    """The numbers as uint8 if that changes no value."""
    with np.errstate(invalid="ignore"):
        pixels = numbers.astype(np.uint8)
    return pixels if np.array_equal(pixels, numbers) else numbers


def _labels(texts: list[str]) -> np.ndarray:
    return np.array(list(map(int, texts)), np.int64) if all(map(INTEGER.fullmatch, texts)) else np.array(texts)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_plain(text: str) -> bool:
    """False for digits of other scripts and groups such as 1_000, which Python reads as numbers."""
    return text.isascii() and "_" not in text


def _is_finite(text: str) -> bool:
    with np.errstate(over="ignore"):
        return _is_number(text) and bool(np.isfinite(np.float32(float(text))))


def _name(column: int, names: Sequence[str] | None) -> str:
    return f"{column} ({_printable(names[column])})" if names else str(column)


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= 40 else repr(name[:40])
