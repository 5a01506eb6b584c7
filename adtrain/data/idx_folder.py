"""A folder of IDX files, named as MNIST's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from adtrain.data import idx
from adtrain.data.errors import DataError
from adtrain.data.part import Found, Part

IMAGES, LABELS = ("idx3-ubyte", "idx4-ubyte"), ("idx1-ubyte",)


def is_one(folder: Path) -> bool:
    """Whether any file in it is named as one of MNIST's."""
    return any(_names(folder, part, kind) for part in ("train", "t10k") for kind in ("images", "labels"))


def read(folder: Path) -> Found:
    """train-images-idx3-ubyte and train-labels-idx1-ubyte; and t10k-images-..., t10k-labels-... where one of them is.

    Files may be gzip-compressed, with .gz after their names, and have a dot in place of the last hyphen but one; images
    of several channels, (N, C, H, W), are called idx4-ubyte. Raises DataError as `idx.read` does, and for what does not
    fit together.
    """
    has_test = any(_names(folder, "t10k", kind) for kind in ("images", "labels"))
    return Found(_read_part(folder, "train"), _read_part(folder, "t10k") if has_test else None)


def _read_part(folder: Path, part: str) -> Part:
    image_file, label_file = _find(folder, f"{part}-images", IMAGES), _find(folder, f"{part}-labels", LABELS)
    images, labels = _read_bytes(image_file, (3, 4)), _read_bytes(label_file, (1,))
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: found {len(labels)} labels, expected {len(images)}, one for each image of {image_file.name}"
        )
    if images.size == 0:
        raise DataError(f"{image_file}: found no pixels (shape {images.shape}), expected at least one image")
    shaped = images[:, np.newaxis] if images.ndim == 3 else images
    return Part(shaped, labels.astype(np.int64), str(label_file))


def _names(folder: Path, part: str, kind: str) -> list[Path]:
    return list(folder.glob(f"{part}-{kind}[-.]idx?-ubyte*"))


def _find(folder: Path, stem: str, endings: tuple[str, ...]) -> Path:
    """The file under one of its names; the uncompressed one where both are there."""
    names = [f"{stem}{sep}{ending}{suffix}" for ending in endings for suffix in ("", ".gz") for sep in "-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: found no file {names[0]}, expected it or one of {', '.join(names[1:])}")


def _read_bytes(path: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    array = idx.read(path)
    if array.dtype != np.uint8 or array.ndim not in dimensions:
        found, expected = f"{array.dtype} in {array.ndim} dimensions", " or ".join(map(str, dimensions))
        raise DataError(f"{path}: found {found}, expected uint8 in {expected} (magic number 0x0000080{dimensions[0]})")
    return array
