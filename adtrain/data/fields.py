"""The data of a neural field: the pixels of an image, or the elements of an array, each at its place in [0, 1]^d.

Element i of an axis of n elements has the coordinate (i + 1/2) / n. Each training step draws its elements: see
`augment.Drawn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from adtrain.data.datasets import DataSet
from adtrain.data.errors import DataError
from adtrain.data.file_array import require_memory
from adtrain.data.images import read_image
from adtrain.data.npz import read_npy
from adtrain.data.part import Columns
from adtrain.data.split import Split
from adtrain.data.statistics import PIXEL_MAX
from adtrain.data.table_encoder import TableEncoder

FieldKind: TypeAlias = Literal["image", "volume"]
IMAGE_AXES: tuple[str, ...] = ("y", "x")
VOLUME_AXES = ("x", "y", "z", "t")
CHANNELS: dict[int, tuple[str, ...]] = {1: ("grey",), 3: ("red", "green", "blue")}
KIND_SUFFIXES: dict[FieldKind, tuple[str, ...]] = {"image": (".png", ".jpg", ".jpeg"), "volume": (".npy",)}
CENTRE = 0.5
"""The mean and half the length of the unit interval: networks get coordinates in [-1, 1]."""


def load(path: Path, kind: FieldKind) -> DataSet:
    """The data set of a field: an example is an element, its label float32 (outputs,) the numbers there.

    Images are PNG or JPEG files; a label has the grey value or the colours in [0, 1]. A volume is an .npy file of 1 to
    4 axes with one number for each element. Training and test part are the same elements.

    Raises:
        DataError: the file is missing, damaged, transparent, of the other kind, or has another shape or other numbers.
    """
    suffix = path.suffix.lower()
    if suffix in (KIND_SUFFIXES["volume"] if kind == "image" else KIND_SUFFIXES["image"]):
        other = "volume" if kind == "image" else "image"
        expected = "a PNG or JPEG file" if kind == "image" else "an .npy file"
        raise DataError(f"{path}: found the extension {suffix}, expected {expected}; data.{other} takes this one")
    if kind == "image":
        pixels = read_image(path)
        axes, outputs = IMAGE_AXES, CHANNELS[len(pixels)]
        values = np.moveaxis(pixels, 0, -1).astype(np.float32) / PIXEL_MAX
    else:
        found = read_npy(path, "1 to 4 axes, none of them empty", lambda shape: len(shape) > 0 and min(shape) > 0)
        with np.errstate(over="ignore"):
            values = found[..., np.newaxis].astype(np.float32)
        axes, outputs = VOLUME_AXES[: found.ndim], ("value",)
        if not np.isfinite(values).all():
            raise DataError(f"{path}: found a number that is not finite in float32, expected finite ones")
    require_memory(str(path), 4 * (values.ndim + 1) * values.size)
    return _of_values(path.stem, axes, outputs, values)


def placeholder(name: str, count: int, coordinates: int, outputs: int) -> DataSet:
    """A data set of `count` zeros, with the types of one that `load` returns."""
    axes, zero = VOLUME_AXES[:coordinates], np.zeros((), np.float32)
    names = tuple(map(str, range(outputs)))
    return _of_values(name, axes, names, np.broadcast_to(zero, (count, *(1,) * (coordinates - 1), outputs)))


def _of_values(name: str, axes: Sequence[str], outputs: tuple[str, ...], values: np.ndarray) -> DataSet:
    """The data set of an array (*shape, outputs)."""
    split = Split(places(values.shape[:-1]), values.reshape(-1, len(outputs)))
    return DataSet(
        name=name,
        train=split,
        test=split,
        classes=(),
        mean=(CENTRE,) * len(axes),
        std=(CENTRE,) * len(axes),
        encoder=TableEncoder(Columns.named(axes), ()),
        targets=outputs,
    ).with_train(split)


def places(shape: tuple[int, ...]) -> np.ndarray:
    """The places of the elements of an array, the last axis fastest, as images float32 (N, axes, 1, 1)."""
    axes = [((np.arange(n) + 0.5) / n).astype(np.float32) for n in shape]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    return grid.reshape(-1, len(shape), 1, 1)


def shape_of(images: np.ndarray) -> tuple[int, ...]:
    """The shape of the array whose elements have these places."""
    return tuple(len(np.unique(images[:, i])) for i in range(images.shape[1]))
