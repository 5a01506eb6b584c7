"""The data formats: how a path's format is recognised, its reader, and the options it takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from adtrain.data import csv_file, csv_table, idx_folder, image_folder, npz, text_file
from adtrain.data.columns import Columns
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import FileFormat, Options
from adtrain.data.part import Parts

COMMON_OPTIONS = frozenset({"test", "test_path"})


Known: TypeAlias = Columns | tuple[str, ...] | None
"""What the training part determines: the columns of a table, or the names of the classes. None: nothing is known."""


class Format(NamedTuple):
    """A format: its name in messages, its options in addition to COMMON_OPTIONS, and its reader."""

    title: str
    options: frozenset[str]
    read: Callable[[Path, Options, Known], Parts]


IDX = Format("a folder of IDX files", frozenset(), lambda path, options, known: idx_folder.read(path))
IMAGES = Format(
    "a folder of images",
    frozenset({"image_size", "channels", "skip_broken"}),
    lambda path, options, known: image_folder.read(path, options),
)
NPZ = Format("an NPZ file", frozenset({"shape"}), lambda path, options, known: npz.read(path, options))
CSV_OPTIONS = frozenset(
    ("label", "target", "header", "delimiter", "drop", "categories", "category_encoding", "missing", "missing_values")
)
CSV = Format(
    "a CSV file",
    CSV_OPTIONS | {"format", "shape"},
    lambda path, options, known: csv_table.read(path, options, known if isinstance(known, Columns) else None),
)
TEXT = Format(
    "a text file",
    frozenset({"format", "length", "unit"}),
    lambda path, options, known: text_file.read(path, options, known if isinstance(known, tuple) else None),
)
FORMATS = (IDX, IMAGES, NPZ, CSV, TEXT)


def read(path: Path, options: Options, known: Known = None) -> Parts:
    """The parts at `path`; the test part is at `options.test_path` if that is set.

    `known` are the columns to read if it is a table, by default all that the options leave, or the classes of a text.

    Raises DataError for files that cannot be read, and DataOptionError for an option that the format does not take.
    """
    format_ = format_of(path, options.format)
    check_options(options, format_.options, format_.title)
    found = format_.read(path, options, known)
    if options.test_path is None:
        return found
    second = Path(os.path.expanduser(options.test_path))
    if found.test is not None:
        raise DataOptionError("test_path", f"found {second}, but {path} has a test part; remove this option")
    if (other := format_of(second, options.format)) is not format_:
        raise DataOptionError("test_path", f"found {other.title} at {second}, expected {format_.title} like {path}")
    test = format_.read(second, options, found.train.columns or found.classes)
    if test.test is not None:
        raise DataOptionError("test_path", f"found two parts in {second}, expected the test part only")
    classes = tuple(sorted({*found.classes, *test.classes}))
    return found._replace(test=test.train, skipped=found.skipped + test.skipped, classes=classes)


def check_options(options: Options, allowed: frozenset[str], title: str) -> None:
    """Raise DataOptionError for an option that is not in `allowed` or COMMON_OPTIONS; `title` says what was found."""
    for name in options.given:
        if name not in allowed | COMMON_OPTIONS:
            expected = " or ".join(other.title for other in FORMATS if name in other.options)
            raise DataOptionError(name, f"an option of {expected}, found {title}")


def format_of(path: Path, given: FileFormat | None = None) -> Format:
    """The format of a file as `given` or by its suffix, of a folder by its content.

    Raises DataError for an unknown format.
    """
    if path.is_dir():
        if idx_folder.is_idx_folder(path):
            return IDX
        if any(entry.is_dir() for entry in path.iterdir() if not entry.name.startswith(".")):
            return IMAGES
        raise DataError(
            f"{path}: found neither IDX files nor subfolders, expected train-images-idx3-ubyte or a folder per class"
        )
    format_ = NPZ if path.suffix.lower() == ".npz" else None
    if text_file.is_text(path, given):
        format_ = TEXT
    elif csv_file.is_table(path, given):
        format_ = CSV
    if format_ is None or not path.is_file():
        if not path.is_file():
            found = "neither a file nor a folder" if path.exists() else "nothing"
        else:
            found = f"the extension {path.suffix}" if path.suffix else "a file without an extension"
        expected = "expected a .csv, .tsv, .npz or .txt file, or a folder of images or IDX files"
        reads = "data.format: csv reads any file as a table, data.format: text as a text"
        advice = reads if path.exists() else "--set data.path=FILE names another"
        raise DataError(f"{path}: found {found}, {expected}; {advice}")
    return format_
