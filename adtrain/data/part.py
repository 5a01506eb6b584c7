"""What the readers of files have in common: one part of a data set as it was found, and checks of its arrays."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options

# Deflate makes a byte of at most so many.
MOST_COMPRESSED = 1032


@dataclass(frozen=True)
class Part:
    """Examples as a reader found them at `place`: labels (N,) are integers or strings of any values.

    `images` are uint8 or float32 (N, C, H, W), `features` the names of the channels, where the file has some.
    """

    images: np.ndarray
    labels: np.ndarray
    place: str
    features: tuple[str, ...] = ()


class Found(NamedTuple):
    """The parts that a source has, the images that were left out, and the classes where it names them."""

    train: Part
    test: Part | None = None
    skipped: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def as_images(array: np.ndarray, place: str, options: Options) -> np.ndarray:
    """An array of numbers as images uint8 or float32 (N, C, H, W); without a copy where its type and order allow.

    (N, F) becomes (N, *options.shape), or (N, F, 1, 1); (N, H, W) gets a channel. Of four axes the channels are the
    ones that `options.shape` says, or else the first after N with 1 or 3 elements, or else the last one with 1 or 3.
    uint8 stays; other integers that fit become it; all else becomes float32. Raises DataError for what is not such an
    array, and DataOptionError where it does not fit `options.shape`.
    """
    if array.dtype.kind not in "buif":
        raise DataError(f"{place}: found elements of type {array.dtype}, expected integers or floats")
    if not 2 <= array.ndim <= 4:
        raise DataError(
            f"{place}: found the shape {array.shape}, expected (N, F), (N, H, W), (N, H, W, C) or (N, C, H, W)"
        )
    if array.size == 0:
        raise DataError(f"{place}: found no pixels (shape {array.shape}), expected at least one image")
    return _typed(_shaped(array, place, options.shape))


def as_labels(array: np.ndarray, count: int, place: str) -> np.ndarray:
    """Labels (N,) or (N, 1) of integers or strings as (N,), one for each of `count` images; else a DataError."""
    labels = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if labels.ndim != 1 or labels.dtype.kind not in "uiU":
        found = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"{place}: found {found}, expected an integer or a string for each image")
    if len(labels) != count:
        raise DataError(f"{place}: found {len(labels)} labels, expected {count}, one for each image")
    if labels.dtype == np.uint64 and count and labels.max() > np.iinfo(np.int64).max:
        raise DataError(f"{place}: found label {labels.max()}, expected one below 2^63")
    return labels if labels.dtype.kind == "U" else labels.astype(np.int64)


def require_memory(place: str, nbytes: int, advice: str = "") -> None:
    """DataError where so many bytes are more than the machine has memory, before they are allocated."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        found = f"{nbytes / 2**30:,.1f} GiB to hold in memory, this machine has {memory / 2**30:,.1f}"
        raise DataError(f"{place}: found {found}{advice}")


def _shaped(array: np.ndarray, place: str, shape: tuple[int, int, int] | None) -> np.ndarray:
    count, *sizes = array.shape
    images = array[:, np.newaxis] if array.ndim == 3 else array.reshape(count, *sizes, *(1,) * (4 - array.ndim))
    if shape is None:
        if array.ndim == 4 and sizes[0] not in (1, 3) and sizes[2] in (1, 3):
            return array.transpose(0, 3, 1, 2)
        return images
    channels, height, width = shape
    if array.ndim == 2 and sizes[0] == channels * height * width:
        return array.reshape(count, *shape)
    if images.shape[1:] == shape:
        return images
    if array.ndim == 4 and tuple(sizes) == (height, width, channels):
        return array.transpose(0, 3, 1, 2)
    raise DataOptionError("shape", f"found {list(shape)}, but {place} has images of shape {sizes}")


def _typed(images: np.ndarray) -> np.ndarray:
    if images.dtype in (np.uint8, np.float32):
        return images
    if images.dtype == bool or (images.dtype.kind in "ui" and images.min() >= 0 and images.max() <= 255):
        return images.astype(np.uint8)
    with np.errstate(over="ignore"):  # an infinity is found, and named, with the statistics
        return images.astype(np.float32)
