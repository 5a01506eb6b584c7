"""Mean and standard deviation of each channel, and numbers as float32 without losing the differences between them.

All is computed in chunks, because images may be larger than memory. float32 has 24 bits. Near 1700000000
it has only every 128th integer. So numbers far from 0 get an offset, which is subtracted from them in float64 before
they are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.file_array import Conversion, FileArray, require_memory
from adtrain.data.split import Images, Stored, chunks

PIXEL_MAX = 255

LARGEST_MEAN = 256
"""A channel whose mean is more than this number of standard deviations from 0 gets an offset. In the
other channels float32 has rounding errors of up to about 3e-5 standard deviations."""

LOST = 1e-3
"""The least rounding error, in standard deviations, of which the user is told."""

FENCE = 3
"""Interquartile ranges from a quartile, from which on a target is extreme."""

EXACT = frozenset(map(np.dtype, ("bool", "int8", "uint8", "int16", "uint16", "float16", "float32")))
"""The types whose numbers float32 has."""

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def channel_statistics(images: Images, name: str = "images") -> Statistics:
    """Per-channel mean and standard deviation of images (N, C, H, W): of uint8 / 255, or of unscaled numbers.

    A channel of equal numbers has standard deviation 1, so that it can be divided by. Raises DataError, with `name` and
    the row, if a number is not finite.
    """
    if images.dtype == np.uint8:
        return _of_pixels(images)
    return _of_numbers(images, name)


def target_statistics(labels: np.ndarray, robust: bool = False) -> Statistics:
    """Mean and standard deviation of each column of numbers to predict (N, targets); 1 for a constant column.

    With `robust` they are those of the numbers that are not `extreme`.
    """
    if robust:
        kept = [column[~far] for column, far in zip(labels.T, extreme(labels).T, strict=True)]
        pairs = [target_statistics(column[:, np.newaxis]) for column in kept]
        return tuple(mean for (mean,), _ in pairs), tuple(std for _, (std,) in pairs)
    std = _divisors(labels.std(axis=0), labels.min(axis=0), labels.max(axis=0))
    return tuple(labels.mean(axis=0).tolist()), std


def extreme(labels: np.ndarray) -> np.ndarray:
    """Which numbers (N, targets) are extreme: outside of the outer fences of their column (Tukey, 1977).

    These are 3 interquartile ranges below the lower quartile and above the upper one. Where the quartiles are equal, no
    number is extreme.
    """
    lower, upper = np.quantile(labels, (0.25, 0.75), axis=0)
    reach = np.where(upper > lower, FENCE * (upper - lower), np.inf)
    found: np.ndarray = (labels < lower - reach) | (labels > upper + reach)
    return found


def _divisors(std: np.ndarray, least: np.ndarray, greatest: np.ndarray) -> tuple[float, ...]:
    """The standard deviations; 1 in place of the rounding error of equal numbers, and of 0."""
    return tuple(np.where((least < greatest) & (std > 0), std, 1.0).tolist())


def cell_statistics(cells: np.ndarray) -> Statistics:
    """Mean and standard deviation of the numbers in each column of a table (N, columns), without NaN."""
    count, mean, squares = np.zeros((3, cells.shape[1]))
    for chunk in chunks(cells):  # by the update of `_of_numbers`
        values = chunk.T.copy()
        empty = np.isnan(values)
        first = values[np.arange(len(values)), empty.argmin(axis=1)]  # of numbers far from 0 a sum is inexact
        first[np.isnan(first)] = 0
        values -= first[:, np.newaxis]
        values[empty] = 0
        new = values.shape[1] - np.count_nonzero(empty, axis=1)
        total = np.maximum(count + new, 1)
        means = values.sum(axis=1) / np.maximum(new, 1)
        values -= means[:, np.newaxis]
        values[empty] = 0
        delta = first + means - mean
        squares += np.square(values, out=values).sum(axis=1) + delta**2 * count * new / total
        mean += delta * new / total
        count += new
    std = np.sqrt(squares / np.maximum(count, 1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _of_pixels(images: Images) -> Statistics:
    """The statistics of pixels, by exact integer sums of the values and of their squares."""
    channels = images.shape[1]
    sums, squares, count = [0] * channels, [0] * channels, len(images) * math.prod(images.shape[2:])
    for chunk in chunks(images):
        for c in range(channels):
            values = chunk[:, c]
            sums[c] += int(values.sum(dtype=np.uint64))
            squares[c] += int(np.square(values, dtype=np.uint16).sum(dtype=np.uint64))
    pairs = zip(sums, squares, strict=True)
    stds = (math.sqrt(count * square - total**2) / (count * PIXEL_MAX) for total, square in pairs)
    return tuple(total / (count * PIXEL_MAX) for total in sums), tuple(std or 1.0 for std in stds)


def _of_numbers(images: Images, name: str) -> Statistics:
    """The statistics of numbers, in float64, chunk by chunk (Chan, Golub and LeVeque, 1979)."""
    count, done = 0, 0
    mean, squares = np.zeros(images.shape[1]), np.zeros(images.shape[1])
    least, greatest = np.full(images.shape[1], np.inf), np.full(images.shape[1], -np.inf)
    for chunk in chunks(images):
        values = chunk.swapaxes(0, 1).astype(np.float64, "C").reshape(images.shape[1], -1)
        low, high = values.min(axis=1), values.max(axis=1)
        if not np.isfinite([low, high]).all():
            row = int(np.flatnonzero(~np.isfinite(chunk).reshape(len(chunk), -1).all(axis=1))[0])
            raise DataError(f"{name}: found a number that is not finite in row {done + row}, expected finite ones")
        first = values[:, :1].copy()  # of numbers far from 0 a sum is inexact
        values -= first
        new, means = values.shape[1], values.mean(axis=1)
        values -= means[:, np.newaxis]
        delta = first[:, 0] + means - mean
        squares += np.square(values, out=values).sum(axis=1) + delta**2 * count * new / (count + new)
        mean += delta * new / (count + new)
        least, greatest = np.minimum(least, low), np.maximum(greatest, high)
        count, done = count + new, done + len(chunk)
    return tuple(mean.tolist()), _divisors(np.sqrt(squares / count), least, greatest)


def offsets(mean: Sequence[float], std: Sequence[float]) -> tuple[float, ...]:
    """The number that is subtracted from each channel with this mean and deviation before it becomes float32."""
    return tuple(m if abs(m) > LARGEST_MEAN * s else 0.0 for m, s in zip(mean, std, strict=True))


def digits(mean: float, std: float, usual: int) -> int:
    """The significant digits in which to show numbers with this mean and deviation; `usual` near 0."""
    return usual + (math.ceil(math.log10(abs(mean) / std)) if abs(mean) > LARGEST_MEAN * std else 0)


def holding(dtype: np.dtype) -> np.dtype:
    """float32 if it has all numbers of the type, otherwise float64."""
    return FLOAT32 if dtype.newbyteorder("=") in EXACT else FLOAT64


def converted(images: Stored, conversion: Conversion, place: str) -> Stored:
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


def as_float32(images: Stored, offset: Sequence[float], place: str) -> Stored:
    """Images of numbers (N, C, H, W) minus the offset of each channel, as float32; not copied if they are that."""
    shift = np.array(offset).reshape(-1, 1, 1) if any(offset) else None
    return converted(images, Conversion(FLOAT32, shift), place)


def lossy_channels(images: Images, std: Sequence[float]) -> list[int]:
    """The channels whose differences float32 loses: those with a rounding error above LOST deviations."""
    if images.dtype == FLOAT32:
        return []
    errors = [np.abs(chunk - chunk.astype(np.float32)).max(axis=(0, 2, 3)) for chunk in chunks(images)]
    return np.flatnonzero(np.max(errors, axis=0) > LOST * np.array(std)).tolist()
