"""CSV tables: one line per example; one column holds the labels, or some the numbers to predict."""

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
    """The table as one part: labels or targets from some columns, float32 features (N, F, 1, 1) from all others.

    With `options.shape` the features are images (N, *shape), uint8 if all values are integers from 0 to 255. Labels are
    equal if their texts are; they become integers if all are written as such, without a sign + or leading zeros. By
    default the first line is a header if none of its values is a number. Targets are float64 (N, targets). Raises
    DataError with line and column, and DataOptionError if the column of the labels or of a target is missing or
    unknown, or if the labels are fractions.
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
    columns = _target_columns(path, options, first, header) or [_label_column(path, options.label, first, header)]
    kept = [i for i in range(len(first)) if i not in columns]
    chunks: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    labels: list[str] = []
    remaining = rows if header else chain([(line, list(first))], rows)
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        features, chosen = [], []
        for line, row in chunk:
            if len(row) != len(first):
                raise DataError(f"{path}:{line}: found {len(row)} values, expected {len(first)} as in the first line")
            chosen.append([row[i].strip() for i in columns])
            if options.target is None and not chosen[-1][0]:
                raise DataError(f"{path}:{line}: found no value in column {_name(columns[0], names)}, expected a label")
            features.append([row[i] for i in kept])
        lines = [line for line, _ in chunk]
        chunks.append(_numbers(path, lines, features, kept, names))
        if options.target is None:
            labels += [texts[0] for texts in chosen]
        else:
            targets.append(_numbers(path, lines, chosen, columns, names, np.float64))
    if not chunks:
        raise DataError(f"{path}: found no rows, expected one per example")
    numbers = np.concatenate(chunks)
    images = as_images(_as_pixels(numbers) if options.shape else numbers, str(path), options)
    named = names is not None and images.shape[1:] == (numbers.shape[1], 1, 1)
    feature_names = tuple(first[i] for i in kept) if named else ()
    found = _labels(path, labels, columns[0], names) if options.target is None else np.concatenate(targets)
    target_names = tuple(first[i] if names else f"column {i}" for i in columns)
    return Part(images, found, str(path), feature_names, target_names)


def _label_column(path: Path, label: str | int | None, first: Sequence[str], header: bool) -> int:
    """The index of the labels' column, from 0."""
    return _column(path, "label", label, first, header)


def _target_columns(path: Path, options: Options, first: Sequence[str], header: bool) -> list[int]:
    """The indices of the targets' columns, from 0; empty without targets."""
    if options.target is None:
        return []
    given = options.target if isinstance(options.target, tuple) else (options.target,)
    columns = [_column(path, "target", column, first, header) for column in given]
    if len(set(columns)) < len(columns):
        raise DataOptionError("target", f"found {list(given)}, expected each column once")
    if len(columns) == len(first):
        raise DataOptionError("target", f"found all {len(first)} columns of {path}, expected at least one other column")
    return columns


def _column(path: Path, option: str, given: str | int | None, first: Sequence[str], header: bool) -> int:
    """The index, from 0, of the column that `option` names."""
    listed = ", ".join(map(_printable, first[:MAX_LISTED])) + (", ..." if len(first) > MAX_LISTED else "")
    columns = f"the columns are {listed}" if header else f"there is no header, the columns are 0 to {len(first) - 1}"
    if given is None:
        if header and "label" in first:
            return first.index("label")
        raise DataOptionError(option, f"missing, expected the column of {path} with the labels: {columns}")
    if isinstance(given, int) and -len(first) <= given < len(first):
        return given % len(first)
    if header and isinstance(given, str) and given in first:
        return first.index(given)
    raise DataOptionError(option, f"found {given!r}, which is no column of {path}: {columns}")


def _numbers(
    path: Path,
    lines: Sequence[int],
    rows: list[list[str]],
    columns: Sequence[int],
    names: Sequence[str] | None,
    dtype: type[np.floating] = np.float32,
) -> np.ndarray:
    """The values of a chunk of rows in these columns, (rows, columns). Raises DataError for the first invalid value."""
    if all(map(_is_plain, map("".join, rows))):
        with suppress(ValueError), np.errstate(over="ignore"):
            numbers = np.array(rows, dtype)
            if np.isfinite(numbers.astype(np.float32)).all():
                return numbers
    for line, row in zip(lines, rows, strict=True):
        for i, text in enumerate(row):
            if not (_is_plain(text) and _is_finite(text)):
                where, column = f"{path}:{line}", _name(columns[i], names)
                raise DataError(f"{where}: found {text[:40]!r} in column {column}, expected a finite number")
    raise AssertionError(f"{path}: NumPy cannot convert a chunk in which every value is a finite number")


def _as_pixels(numbers: np.ndarray) -> np.ndarray:
    """The numbers as uint8 if that changes no value."""
    with np.errstate(invalid="ignore"):
        pixels = numbers.astype(np.uint8)
    return pixels if np.array_equal(pixels, numbers) else numbers


def _labels(path: Path, texts: list[str], column: int, names: Sequence[str] | None) -> np.ndarray:
    """The labels as integers or texts. Raises DataOptionError where all are numbers and one is a fraction."""
    if all(map(INTEGER.fullmatch, texts)):
        return np.array(list(map(int, texts)), np.int64)
    if all(_is_plain(text) and _is_finite(text) for text in texts):
        fraction = next((text for text in texts if not float(text).is_integer()), None)
        if fraction is not None:
            found = f"found {fraction[:40]} in column {_name(column, names)} of {path}, expected classes"
            advice = f"data.target: {names[column] if names else column}, and a loss such as mse"
            raise DataOptionError("label", f"{found}; to predict numbers, set {advice}")
    return np.array(texts)


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
