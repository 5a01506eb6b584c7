"""Numbers as float32, in which images of numbers are stored, without losing the differences between them.

float32 has 24 bits. Of 1700000000 and the next 127 integers it keeps one number. So numbers far from 0 get an offset,
which is subtracted from them in float64 before they are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adtrain.data.file_array import Conversion, FileArray
from adtrain.data.memory import require_memory
from adtrain.data.split import Images, chunks

LARGEST_MEAN = 256
"""Standard deviations. A channel with a mean further from 0 gets an offset. Up to here float32 loses 3e-5 of one."""

LOST = 1e-3
"""The least rounding error, in standard deviations, of which the user is told."""

EXACT = frozenset(map(np.dtype, ("bool", "int8", "uint8", "int16", "uint16", "float16", "float32")))
"""The types whose numbers float32 has."""

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def offsets(mean: Sequence[float], std: Sequence[float]) -> tuple[float, ...]:
    """The number that is subtracted from each channel with this mean and deviation before it becomes float32."""
    return tuple(m if abs(m) > LARGEST_MEAN * s else 0.0 for m, s in zip(mean, std, strict=True))


def digits(mean: float, std: float, usual: int) -> int:
    """The significant digits in which to show numbers with this mean and deviation; `usual` near 0."""
    return usual + (math.ceil(math.log10(abs(mean) / std)) if abs(mean) > LARGEST_MEAN * std else 0)


def holding(dtype: np.dtype) -> np.dtype:
    """float32 if it has all numbers of the type, otherwise float64."""
    return FLOAT32 if dtype.newbyteorder("=") in EXACT else FLOAT64


def converted(images: np.ndarray | FileArray, conversion: Conversion, place: str) -> np.ndarray | FileArray:
    """The images in another type; those in a file are converted when they are read.

    Raises DataError, with `place`, where the memory cannot hold them.
    """
    if images.dtype == conversion.dtype and conversion.offset is None:
        return images
    if isinstance(images, FileArray):
        return images.converted(conversion)
    require_memory(place, images.size * conversion.dtype.itemsize)
    found, done = np.empty(images.shape, conversion.dtype), 0
    for chunk in chunks(images):
        found[done : done + len(chunk)] = conversion(chunk)
        done += len(chunk)
    return found


def as_float32(images: np.ndarray | FileArray, offset: Sequence[float], place: str) -> np.ndarray | FileArray:
    """Images of numbers (N, C, H, W) minus the offset of each channel, as float32; not copied if they are that."""
    shift = np.array(offset).reshape(-1, 1, 1) if any(offset) else None
    return converted(images, Conversion(FLOAT32, shift), place)


def lossy_channels(images: Images, std: Sequence[float]) -> list[int]:
    """The channels whose differences float32 loses: those with a rounding error above LOST deviations."""
    if images.dtype == FLOAT32:
        return []
    errors = [np.abs(chunk - chunk.astype(np.float32)).max(axis=(0, 2, 3)) for chunk in chunks(images)]
    return np.flatnonzero(np.max(errors, axis=0) > LOST * np.array(std)).tolist()
