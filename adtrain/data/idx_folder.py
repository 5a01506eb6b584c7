"""A folder of IDX files with MNIST's file names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from adtrain.data import idx
from adtrain.data.errors import DataError
from adtrain.data.file_array import FileArray
from adtrain.data.part import Part, Parts
from adtrain.text import counted

IMAGES, LABELS = ("idx3-ubyte", "idx4-ubyte"), ("idx1-ubyte",)


def is_idx_folder(folder: Path) -> bool:
    """True if a file in the folder has one of MNIST's names."""
    return _has_part(folder, "train") or _has_part(folder, "t10k")


def read(folder: Path) -> Parts:
    """Read train-images-idx3-ubyte and train-labels-idx1-ubyte, and t10k-... as the test part if there is one.

    Files may be compressed (train-images-idx3-ubyte.gz) and have a dot in the name (train-images.idx3-ubyte). Images
    with several channels, (N, C, H, W), are named idx4-ubyte. Raises DataError as `idx.read` does, and for images and
    labels that do not match.
    """
    return Parts(_read_part(folder, "train"), _read_part(folder, "t10k") if _has_part(folder, "t10k") else None)


def _read_part(folder: Path, part: str) -> Part:
    image_file, label_file = _find(folder, f"{part}-images", IMAGES), _find(folder, f"{part}-labels", LABELS)
    images, labels = _read_bytes(image_file, (3, 4)), np.asarray(_read_bytes(label_file, (1,)))
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: found {counted(len(labels), 'labels')}, expected {len(images)}, "
            f"one for each image of {image_file.name}"
        )
    if images.size == 0:
        raise DataError(f"{image_file}: found no pixels (shape {images.shape}), expected at least one image")
    shaped = images.reshape(len(images), 1, *images.shape[1:]) if images.ndim == 3 else images
    return Part(shaped, labels.astype(np.int64), str(label_file))


def _has_part(folder: Path, part: str) -> bool:
    return any(any(folder.glob(f"{part}-{kind}[-.]idx?-ubyte*")) for kind in ("images", "labels"))


def _find(folder: Path, stem: str, endings: tuple[str, ...]) -> Path:
    """The file under one of its possible names; an uncompressed file is preferred."""
    names = [f"{stem}{sep}{ending}{suffix}" for ending in endings for suffix in ("", ".gz") for sep in "-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: found no file {names[0]}, expected it or one of {', '.join(names[1:])}")


def _read_bytes(path: Path, dimensions: tuple[int, ...]) -> np.ndarray | FileArray:
    array = idx.read(path)
    if array.dtype != np.uint8 or array.ndim not in dimensions:
        found, expected = f"{array.dtype} in {array.ndim} dimensions", " or ".join(map(str, dimensions))
        raise DataError(f"{path}: found {found}, expected uint8 in {expected} (magic number 0x0000080{dimensions[0]})")
    return array
