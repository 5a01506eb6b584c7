"""The table of data formats, the options that they take together, and how the format of a path is recognised."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from adtrain.data import csv_file, csv_table, idx, image_folder, npz, text_file, token_folder
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.part import NOTHING, Format, Known, Parts
from adtrain.option_types import Fraction, Text

FILES = csv_table.FORMAT, npz.FORMAT, text_file.FORMAT, image_folder.ARCHIVE
FOLDERS = idx.FORMAT, token_folder.FORMAT, image_folder.FOLDER
FORMATS = (*FILES, *FOLDERS)
"""All formats. A format is a file; here are its row, and its options among the bases of `Options`."""

if TYPE_CHECKING:
    FileFormat: TypeAlias = str
else:
    FileFormat = Literal[tuple(each.name.lower() for each in FORMATS if each.suffixes)]


@dataclass(frozen=True)
class CommonOptions:
    """The options of every format.

    Attributes:
        test_path: a second file or folder of the same format, with the test part
        test: the fraction held out as the test part, if the files have none
    """

    test_path: Text | None = None
    test: Fraction = 0.0


@dataclass(frozen=True)
class Options(text_file.TextOptions, image_folder.ImageOptions, csv_file.CsvOptions, CommonOptions):
    """The options of `data.load`. The data section of a config is made from their names, annotations and meanings.

    Attributes:
        format: read a file of any name in this format; default: detected by its suffix
    """

    format: FileFormat | None = None

    @property
    def given(self) -> list[str]:
        """The names of the options that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


def read(path: Path, options: Options, known: Known = NOTHING) -> Parts:
    """The parts at `path`; the test part is at `options.test_path` if that is set.

    `known` are the columns to read if it is a table, by default all that the options leave, or the classes of a text.

    Raises DataError for files that cannot be read, and DataOptionError for an option that the format does not take.
    """
    format_ = format_of(path, options.format)
    check_options(options, format_.takes, format_.title)
    found = format_.read(path, options, known)
    if options.test_path is None:
        return found
    second = Path(os.path.expanduser(options.test_path))
    if found.test is not None:
        raise DataOptionError("test_path", f"found {second}, but {path} has a test part; remove this option")
    if (other := format_of(second, options.format)) is not format_:
        raise DataOptionError("test_path", f"found {other.title} at {second}, expected {format_.title} like {path}")
    test = format_.read(second, options, Known(found.train.columns, found.classes, found.tokenizer))
    if test.test is not None:
        raise DataOptionError("test_path", f"found two parts in {second}, expected the test part only")
    classes = found.classes
    if test.classes != classes:
        classes = tuple(sorted({*classes, *test.classes}))
    return found._replace(test=test.train, skipped=found.skipped + test.skipped, classes=classes)


def check_options(options: Options, allowed: frozenset[str], title: str) -> None:
    """Raise DataOptionError for an option that is neither in `allowed` nor common; `title` says what was found."""
    common = {field.name for field in fields(CommonOptions)}
    for name in options.given:
        if name not in allowed | common:
            expected = " or ".join(other.title for other in FORMATS if name in other.takes)
            raise DataOptionError(name, f"an option of {expected}, found {title}")


def of_name(path: Path | str, given: FileFormat | None = None) -> Format | None:
    """The format of a file as `given` or by its suffix; None if neither tells it."""
    name = str(path).lower()
    for each in FORMATS:
        if each.suffixes and (name.endswith(each.suffixes) if given is None else given == each.name.lower()):
            return each
    return None


def format_of(path: Path, given: FileFormat | None = None) -> Format:
    """The format of a file as `given` or by its suffix, of a folder by its content.

    Raises DataError for an unknown format.
    """
    if path.is_dir():
        found = next((each for each in FOLDERS if each.is_content(path)), None)
        if found is None:
            expected = " or ".join(each.content for each in FOLDERS)
            raise DataError(f"{path}: found a folder of another content, expected {expected}")
        return found
    format_ = of_name(path, given)
    if format_ is not None and path.is_file():
        return format_
    if format_ is not None and not path.exists():
        raise DataError(f"{path}: found nothing, expected {format_.title}; --set data.path=FILE names another")
    if not path.is_file():
        what = "neither a file nor a folder" if path.exists() else "nothing"
    else:
        what = f"the extension {path.suffix}" if path.suffix else "a file without an extension"
    suffixes = ", ".join(suffix for each in FORMATS for suffix in each.suffixes)
    *titles, title = (each.title for each in FOLDERS)
    expected = f"expected a {suffixes} file, {', '.join(titles)} or {title}"
    *names, name = (each.name.lower() for each in FORMATS if each.suffixes)
    reads = f"data.format: {', '.join(names)} or {name} reads a file of any name"
    advice = reads if path.exists() else "--set data.path=FILE names another"
    raise DataError(f"{path}: found {what}, {expected}; {advice}")
