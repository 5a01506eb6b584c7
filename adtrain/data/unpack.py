"""The download locations of data sets, and how the downloaded files are read.

Archive members are read by the names listed here; nothing is extracted under a name from the archive.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adtrain.data import idx
from adtrain.data.errors import DataError

PARTS = ("train", "t10k")
MNIST_FILES = tuple(f"{part}-{kind}" for part in PARTS for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))

MNIST_MOST = 1 << 26
"""Bytes of a file at most: 60,000 images of 28 x 28 pixels have 45 MiB before compression."""

Arrays = Iterator[tuple[str, np.ndarray]]
"""Pairs of an IDX file's name, as `idx_folder` expects it, and its uint8 array."""


@dataclass(frozen=True)
class Download:
    """A file on a server, of at most `most` bytes. `md5` is its published checksum, empty if there is none."""

    url: str
    most: int
    md5: str = ""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """Files on a server, and the function that reads them from a folder; it raises DataError for wrong files."""

    downloads: tuple[Download, ...]
    arrays: Callable[[Path], Arrays]


def mnist_like(server: str, md5: Sequence[str] = ("",) * 4) -> Source:
    """MNIST's four gzip-compressed files."""
    pairs = zip(MNIST_FILES, md5, strict=True)
    downloads = (Download(f"{server}/{name}.gz", MNIST_MOST, digest) for name, digest in pairs)
    return Source(tuple(downloads), _mnist_like)


def _mnist_like(folder: Path) -> Arrays:
    for name in MNIST_FILES:
        yield name, np.asarray(idx.read(folder / f"{name}.gz"))


def _emnist(folder: Path) -> Arrays:
    """The balanced split from the archive of all splits. Its images are stored transposed."""
    import zipfile

    archive, copy = folder / EMNIST.downloads[0].name, folder / "member.gz"
    try:
        with zipfile.ZipFile(archive) as opened:
            for name in MNIST_FILES:
                member = f"gzip/emnist-balanced-{name.replace('t10k', 'test')}.gz"
                with opened.open(member) as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
                array = np.asarray(idx.read(copy))
                yield name, array.swapaxes(1, 2) if array.ndim == 3 else array
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise DataError(f"{archive}: cannot be read ({error})") from error


def _cifar10(folder: Path) -> Arrays:
    """Records of a label and 3 x 32 x 32 pixels, in five training files and one test file."""
    import tarfile

    archive = folder / CIFAR10.downloads[0].name
    files = {}
    try:
        with tarfile.open(archive, "r:gz") as opened:
            for member in opened:
                stream = opened.extractfile(member) if member.isreg() and member.size == CIFAR_FILE else None
                if stream is not None:
                    files[member.name.rpartition("/")[2]] = np.frombuffer(stream.read(CIFAR_FILE), np.uint8)
        for part, names in zip(PARTS, CIFAR_NAMES, strict=True):
            records = np.concatenate([files[name] for name in names]).reshape(-1, CIFAR_RECORD)
            yield f"{part}-images-idx4-ubyte", records[:, 1:].reshape(-1, 3, 32, 32)
            yield f"{part}-labels-idx1-ubyte", records[:, 0]
    except (tarfile.TarError, zlib.error, EOFError, KeyError, ValueError) as error:
        raise DataError(f"{archive}: cannot be read ({error})") from error


CIFAR_NAMES = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)
CIFAR_RECORD = 1 + 3 * 32 * 32
CIFAR_FILE = 10_000 * CIFAR_RECORD
EMNIST = Source(
    (Download("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", 1 << 30, "58c8d27c78d21e728a6bc7b3cc06412e"),),
    _emnist,
)
CIFAR10 = Source(
    (Download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", 1 << 28, "c32a1d4ab5d03f1284b67883e8d87530"),),
    _cifar10,
)
