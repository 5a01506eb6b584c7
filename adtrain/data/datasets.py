"""Labelled images: a data set of the catalogue by name, or a folder of IDX files by path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adtrain.data import catalogue, idx
from adtrain.data.errors import DataError

PIXEL_MAX = 255


@dataclass(frozen=True)
class Split:
    """One part of a data set: `images` uint8 (N, C, H, W), `labels` int64 (N,)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Split:
        """The examples at these indices, in their order."""
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class DataSet:
    """Both parts of a data set. `mean` and `std` are per channel, of the training pixels divided by 255."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(dataset: str | None = None, path: str | Path | None = None) -> DataSet:
    """The data set of the catalogue with that name, or the one in the folder at `path`; exactly one is given.

    A folder holds MNIST's four files, gzip-compressed or not: train-images-idx3-ubyte, train-labels-idx1-ubyte,
    t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte (or .idx3-ubyte, .idx1-ubyte). Its classes are 0 to the
    largest label.
    Raises DataError, one line naming the file, for whatever is missing, damaged or does not fit together.
    """
    if (dataset is None) == (path is None):
        raise DataError("data needs either a data set's name or a folder's path, and not both")
    if dataset is not None:
        entry = catalogue.find(dataset)
        train, test = _read_splits(entry.folder, len(entry.classes))
        return DataSet(entry.name, train, test, entry.classes, entry.mean, entry.std)
    folder = Path(str(path)).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise DataError(f"{folder}: found {found}, expected a folder of IDX files named as MNIST's")
    train, test = _read_splits(folder)
    count = int(max(train.labels.max(), test.labels.max())) + 1
    classes = tuple(str(label) for label in range(count))
    return DataSet(folder.resolve().name, train, test, classes, *channel_statistics(train.images))


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of images uint8 (N, C, H, W) / 255, per channel, from exact counts of each value.

    A channel of one value only has standard deviation 1, so that it can be divided by.
    """
    values = np.arange(PIXEL_MAX + 1) / PIXEL_MAX
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(PIXEL_MAX + 1, np.int64)
        for start in range(0, len(images), 1024):
            counts += np.bincount(images[start : start + 1024, channel].ravel(), minlength=PIXEL_MAX + 1)
        mean = float(np.average(values, weights=counts))
        means.append(mean)
        stds.append(float(np.sqrt(np.average((values - mean) ** 2, weights=counts))) or 1.0)
    return tuple(means), tuple(stds)


def _read_splits(folder: Path, classes: int | None = None) -> tuple[Split, Split]:
    """Training and test images, of one shape; labels are below `classes` where it is given."""
    train, test = _read_split(folder, "train", classes), _read_split(folder, "t10k", classes)
    train_shape, test_shape = train.images.shape[1:], test.images.shape[1:]
    if train_shape != test_shape:
        raise DataError(f"{folder}: found test images of shape {test_shape}, expected {train_shape} as in training")
    return train, test


def _read_split(folder: Path, part: str, classes: int | None) -> Split:
    image_file = _find(folder, f"{part}-images", "idx3-ubyte")
    label_file = _find(folder, f"{part}-labels", "idx1-ubyte")
    images, labels = _read_bytes(image_file, 3), _read_bytes(label_file, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: found {len(labels)} labels, expected {len(images)}, one for each image of {image_file.name}"
        )
    if images.size == 0:
        raise DataError(f"{image_file}: found no pixels (shape {images.shape}), expected at least one image")
    if classes is not None and (largest := labels.max()) >= classes:
        raise DataError(f"{label_file}: found label {largest}, expected 0 to {classes - 1}")
    return Split(images[:, np.newaxis], labels.astype(np.int64))


def _find(folder: Path, stem: str, ending: str) -> Path:
    """The file under either of its two names; the uncompressed one where both are there."""
    names = [f"{stem}{separator}{ending}{suffix}" for suffix in ("", ".gz") for separator in "-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: found no file {names[0]}, expected it or one of {', '.join(names[1:])}")


def _read_bytes(path: Path, dimensions: int) -> np.ndarray:
    array = idx.read(path)
    if array.dtype != np.uint8 or array.ndim != dimensions:
        found = f"{array.dtype} in {array.ndim} dimensions"
        raise DataError(f"{path}: found {found}, expected uint8 in {dimensions} (magic number 0x0000080{dimensions})")
    return array
