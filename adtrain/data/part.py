"""What all readers return, and conversions and checks of their arrays."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.options import Options

# The largest compression ratio of deflate.
MAX_DEFLATE_RATIO = 1032


@dataclass(frozen=True)
class Part:
    """Examples as a reader returns them.

    `images` are uint8 or float32 (N, C, H, W). `labels` (N,) are integers or strings of any value. `place` is the file
    or folder, for messages. `features` are the names of the channels, if the file has some.
    """

    images: np.ndarray
    labels: np.ndarray
    place: str
    features: tuple[str, ...] = ()


class Parts(NamedTuple):
    """The parts of a file or folder, messages about skipped images, and the names of the classes, if it has them."""

    train: Part
    test: Part | None = None
    skipped: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def as_images(array: np.ndarray, place: str, options: Options) -> np.ndarray:
    """An array of numbers as images, uint8 or float32 (N, C, H, W); not copied if dtype and axis order are right.

    (N, F) becomes (N, *options.shape), or (N, F, 1, 1) without that option. (N, H, W) becomes (N, 1, H, W). Four axes
    are (N, C, H, W) or (N, H, W, C) as `options.shape` says; without that option they are (N, H, W, C) if the last
    axis has 1 or 3 elements and the second has neither. Integers in [0, 255] become uint8, all other numbers float32.
    Raises DataError for any other array, and DataOptionError if it does not fit `options.shape`.
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
    """Labels (N,) or (N, 1), integers or strings, as (N,). Raises DataError unless there is one for each image."""
    labels = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if labels.ndim != 1 or labels.dtype.kind not in "uiU":
        found = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"{place}: found {found}, expected an integer or a string for each image")
    if len(labels) != count:
        raise DataError(f"{place}: found {len(labels)} labels, expected {count}, one for each image")
    if labels.dtype == np.uint64 and count and labels.max() > np.iinfo(np.int64).max:
        raise DataError(f"{place}: found label {labels.max()}, expected one below 2^63")
    if labels.dtype.kind != "U":
        return labels.astype(np.int64)
    texts = np.ascontiguousarray(labels, labels.dtype.newbyteorder("="))
    codes = texts.view(np.uint32).reshape(count, -1) if texts.nbytes else np.zeros((count, 1), np.uint32)
    wrong = (codes > sys.maxunicode) | ((codes >= 0xD800) & (codes < 0xE000))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(f"{place}: found the code 0x{codes[row, column]:x} in label {row}, expected Unicode text")
    return texts


def physical_memory() -> int:
    """The bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(place: str, nbytes: int, advice: str = "") -> None:
    """Raise DataError if `nbytes` is more than the machine's memory; call it before allocating."""
    memory = physical_memory()
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
    with np.errstate(over="ignore"):  # `channel_statistics` refuses infinities
        return images.astype(np.float32)
