"""Folders of PNG and JPEG images with one subfolder per class."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from adtrain.data import images
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.memory import require_memory
from adtrain.data.options import Options
from adtrain.data.part import Part, Parts
from adtrain.text import counted, visible

VALIDATION_FOLDERS = ("val", "valid", "validation")
"""Possible folders of the validation images, next to train/ and test/; the first that exists is used."""

_log = logging.getLogger(__name__)


def read(folder: Path, options: Options) -> Parts:
    """All images as uint8 (N, C, H, W); the classes are the names of the subfolders, in sorted order.

    If train/ has subfolders, it is the training part, test/ the test part, and the first of VALIDATION_FOLDERS has the
    validation images; without test/ these are the test part, with a warning. Hidden files and folders (.name) are
    ignored, and so are files next to the folders of the classes. Files that are no images, and have no name of one, are
    skipped with a warning. Links must stay within the folder. Raises DataError for an unreadable image, and
    DataOptionError if the images differ in size and no size is given.
    """

    def existing(*names: str) -> Path | None:
        return next((folder / name for name in names if (folder / name).is_dir()), None)

    train, test, validation = existing("train"), existing("test"), existing(*VALIDATION_FOLDERS)
    if train is None or not any(entry.is_dir() for entry in _entries(train)):
        train, test, validation = folder, None, None
    elif test is None and validation is not None:
        note = "found no folder test; %s, which has validation images, is the test part"
        _log.warning(f"adtrain: warning: %s: {note}", visible(str(folder)), visible(validation.name))
        test, validation = validation, None
    reader = _Reader(options)
    names = set[str]()

    def files(part: Path | None) -> list[tuple[str, Path]]:
        classes = {} if part is None else _classes(part, folder)
        names.update(classes)
        return [(name, path) for name, paths in classes.items() for path in paths if reader.read_header(path)]

    training, held_out, tested = files(train), files(validation), files(test)
    if reader.others:
        first, count = visible(str(reader.others[0])), counted(len(reader.others), "files")
        what = f"skipped {count} of other types than PNG and JPEG, such as {first}"
        _log.warning("adtrain: warning: %s: %s", visible(str(folder)), what)
    part, kept = reader.read_part([*training, *held_out], train)
    return Parts(
        part,
        None if test is None else reader.read_part(tested, test)[0],
        tuple(reader.skipped),
        tuple(sorted(names)),
        validation_rows=sum(i >= len(training) for i in kept),
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The files and folders that are not hidden, in sorted order."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from error


def _classes(part: Path, folder: Path) -> dict[str, list[Path]]:
    """The files of each class in the folder `part`, which is `folder` or a subfolder of it."""
    classes: dict[str, list[Path]] = {}
    for entry in _entries(part):
        _require_within(entry, folder)
        if entry.is_dir():
            files = _entries(Path(entry.path))
            for file in files:
                _require_within(file, folder)
                if not file.is_file():
                    raise DataError(f"{file.path}: found no regular file, expected an image of class {entry.name!r}")
            if not files:
                raise DataError(f"{entry.path}: found an empty folder, expected the images of class {entry.name!r}")
            classes[entry.name] = [Path(file.path) for file in files]
    if not classes:
        raise DataError(f"{part}: found no subfolders, expected one per class")
    return classes


def _require_within(entry: os.DirEntry[str], folder: Path) -> None:
    try:
        target = Path(os.path.realpath(entry.path, strict=True)) if entry.is_symlink() else None
    except OSError as error:
        raise DataError(f"{entry.path}: cannot be read ({error.strerror or error})") from error
    if target is not None and not target.is_relative_to(os.path.realpath(folder)):
        raise DataError(f"{entry.path}: found a link that leads out of {folder}, expected files in it")


class _Reader:
    """Reads images as arrays of one shape, which it finds from all headers first.

    Call `read_header` for every image, then `read_part`.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.skipped: list[str] = []
        self.others: list[Path] = []
        self.size, self.first, self.colour = options.image_size, Path(), False

    def read_header(self, path: Path) -> bool:
        """Read the image's size and kind; False if the image is skipped."""
        try:
            channels, *size = images.read_header(path)
        except DataError as error:
            if path.suffix.lower() in images.SUFFIXES:
                self._skip(error)
            else:
                self.others.append(path)
            return False
        self.colour |= channels == 3
        if self.size is None:
            self.size, self.first = (size[0], size[1]), path
        elif self.options.image_size is None and self.size != tuple(size):
            sizes = f"{path} is {size[0]} x {size[1]}, {self.first} is {self.size[0]} x {self.size[1]}"
            raise DataOptionError("image_size", f"missing, expected [height, width], as the images differ: {sizes}")
        return True

    def read_part(self, files: list[tuple[str, Path]], place: Path) -> tuple[Part, list[int]]:
        """The images of these files, each with its class, in this order, and the indices of those that can be read."""
        count = len(files)
        if self.size is None or not count:
            raise DataError(f"{place}: found no image that can be read, expected PNG or JPEG files")
        shape = (self.options.channels or (3 if self.colour else 1), *self.size)
        require_memory(str(place), count * int(np.prod(shape)), "; set data.image_size to a smaller one")
        found, kept = np.empty((count, *shape), np.uint8), list[int]()
        for i, (_, path) in enumerate(files):
            try:
                image = images.read_image(path, shape[0])
            except DataError as error:
                self._skip(error)
                continue
            found[len(kept)] = image if image.shape == shape else images.resized(image, *self.size)
            kept.append(i)
        if not kept:
            raise DataError(f"{place}: found no image that can be read, expected PNG or JPEG files")
        return Part(found[: len(kept)], np.array([files[i][0] for i in kept]), str(place)), kept

    def _skip(self, error: DataError) -> None:
        if not self.options.skip_broken:
            raise DataError(f"{error}; data.skip_broken: true skips such images") from error
        self.skipped.append(str(error))
        _log.warning("adtrain: warning: skipped %s", visible(error))
