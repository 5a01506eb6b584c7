"""The data sets that travel with the package: what each is, and the checksums that prove it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from adtrain.assets import asset_path
from adtrain.data import idx
from adtrain.data.errors import DataError


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue.

    `mean` and `std` are per channel, of the training pixels divided by 255. `sha256` maps a file's name to the checksum
    of its bytes before compression, so that recompressing a file does not change it.
    """

    name: str
    title: str
    licence: str
    shape: tuple[int, int, int]
    train_images: int
    test_images: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: dict[str, str]

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return asset_path("datasets") / self.name


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in [
        Entry(
            name="mnist",
            title="handwritten digits, the original split",
            licence="CC BY-SA 3.0",
            shape=(1, 28, 28),
            train_images=60_000,
            test_images=10_000,
            classes=tuple("0123456789"),
            mean=(0.13066047627384286,),
            std=(0.3081078038564627,),
            sha256={
                "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            },
        ),
    ]
}


@dataclass(frozen=True)
class FileCheck:
    """The verdict on one file: `found` is its checksum, or why it has none."""

    path: Path
    expected: str
    found: str

    @property
    def passed(self) -> bool:
        return self.found == self.expected


def verify(entry: Entry) -> list[FileCheck]:
    """One verdict for each file of the data set; a missing or damaged file is a verdict, never an error."""
    paths = {entry.folder / name: expected for name, expected in entry.sha256.items()}
    return [FileCheck(path, expected, raw_sha256(path)) for path, expected in paths.items()]


def raw_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of the file's bytes before compression, or why they cannot be read."""
    digest = hashlib.sha256()
    try:
        with idx.opened(path) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    return digest.hexdigest()


def find(name: str) -> Entry:
    """The entry of that name; DataError listing the known ones otherwise."""
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise DataError(f"unknown data set {name!r}; known: {known} (a folder of IDX files: give its path)")
    return CATALOGUE[name]
