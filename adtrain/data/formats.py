"""Which kind of files lies at a path, who reads it, and which options it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from adtrain.data import idx_folder
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options
from adtrain.data.part import Found

EVERYWHERE = frozenset({"test", "test_path"})


class Format(NamedTuple):
    """A kind of source: its name, the options that it takes besides EVERYWHERE, and its reader."""

    title: str
    options: frozenset[str]
    read: Callable[[Path, Options], Found]


def _idx(path: Path, options: Options) -> Found:
    return idx_folder.read(path)


def _npz(path: Path, options: Options) -> Found:
    from adtrain.data import npz

    return npz.read(path, options)


def _csv(path: Path, options: Options) -> Found:
    from adtrain.data import csv_table

    return csv_table.read(path, options)


def _images(path: Path, options: Options) -> Found:
    from adtrain.data import image_folder

    return image_folder.read(path, options)


IDX = Format("a folder of IDX files", frozenset(), _idx)
IMAGES = Format("a folder of images", frozenset({"image_size", "channels", "skip_broken"}), _images)
NPZ = Format("an NPZ file", frozenset({"shape"}), _npz)
CSV = Format("a CSV file", frozenset({"label", "header", "shape"}), _csv)
FORMATS = (IDX, IMAGES, NPZ, CSV)


def read(path: Path, options: Options) -> Found:
    """The parts at `path`, with `options.test_path` as the test part where that is given.

    Raises DataError for what cannot be read, and DataOptionError for an option that the format does not take.
    """
    kind = format_of(path)
    for name in options.given:
        if name not in kind.options | EVERYWHERE:
            takers = " or ".join(other.title for other in FORMATS if name in other.options)
            raise DataOptionError(name, f"found with {kind.title}, expected it with {takers} only")
    found = kind.read(path, options)
    if options.test_path is None:
        return found
    second = Path(options.test_path).expanduser()
    if found.test is not None:
        raise DataOptionError("test_path", f"found {second}, but {path} has a test part; leave it out")
    if (other := format_of(second)) is not kind:
        raise DataOptionError("test_path", f"found {other.title} at {second}, expected {kind.title} like {path}")
    tested = kind.read(second, options)
    if tested.test is not None:
        raise DataOptionError("test_path", f"found two parts in {second}, expected the test part alone")
    classes = tuple(sorted({*found.classes, *tested.classes}))
    return Found(found.train, tested.train, found.skipped + tested.skipped, classes)


def format_of(path: Path) -> Format:
    """The kind of source at `path`, told by its name, and a folder's by what it holds. DataError where it is none."""
    if path.is_dir():
        if idx_folder.is_one(path):
            return IDX
        if any(entry.is_dir() for entry in path.iterdir() if not entry.name.startswith(".")):
            return IMAGES
        raise DataError(
            f"{path}: found neither IDX files named as MNIST's (train-images-idx3-ubyte) nor a folder of images a class"
        )
    known = {".npz": NPZ, ".csv": CSV}.get(path.suffix.lower())
    if known is None or not path.is_file():
        found = "nothing" if not path.exists() else f"a file ending in {path.suffix!r}"
        raise DataError(f"{path}: found {found}, expected an .npz or .csv file, or a folder of IDX files or of images")
    return known
