"""Mean and standard deviation of each channel, computed in chunks because images may be larger than memory."""

from __future__ import annotations

import math

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.split import Images, chunks

PIXEL_MAX = 255

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def channel_statistics(images: Images, name: str = "images") -> Statistics:
    """Per-channel mean and standard deviation of images (N, C, H, W): of uint8 / 255, or of unscaled numbers.

    A channel of equal numbers has standard deviation 1, so that it can be divided by. Raises DataError, with `name` and
    the row, if a number is not finite.
    """
    if images.dtype == np.uint8:
        return _of_pixels(images)
    return _of_numbers(images, name)


def target_statistics(labels: np.ndarray) -> Statistics:
    """Mean and standard deviation of each column of numbers to predict (N, targets); 1 for a constant column."""
    std = _divisors(labels.std(axis=0), labels.min(axis=0), labels.max(axis=0))
    return tuple(labels.mean(axis=0).tolist()), std


def _divisors(std: np.ndarray, least: np.ndarray, greatest: np.ndarray) -> tuple[float, ...]:
    """The standard deviations; 1 in place of the rounding error of equal numbers, and of 0."""
    return tuple(np.where((least < greatest) & (std > 0), std, 1.0).tolist())


def cell_statistics(cells: np.ndarray) -> Statistics:
    """Mean and standard deviation of the numbers in each column of a table (N, columns), without NaN."""
    filled = ~np.isnan(cells)
    counts = np.maximum(filled.sum(axis=0), 1)
    mean = cells.sum(axis=0, where=filled) / counts
    std = np.sqrt(np.square(cells - mean).sum(axis=0, where=filled) / counts)
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _of_pixels(images: Images) -> Statistics:
    """By exact integer sums of the values and of their squares."""
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
    """In float64, chunk by chunk, by the update of Chan, Golub and LeVeque (1979)."""
    count, done = 0, 0
    mean, squares = np.zeros(images.shape[1]), np.zeros(images.shape[1])
    least, greatest = np.full(images.shape[1], np.inf), np.full(images.shape[1], -np.inf)
    for chunk in chunks(images):
        values = chunk.astype(np.float64).swapaxes(0, 1).reshape(images.shape[1], -1)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(chunk).reshape(len(chunk), -1).all(axis=1))[0])
            raise DataError(f"{name}: found a number that is not finite in row {done + row}, expected finite ones")
        new, means = values.shape[1], values.mean(axis=1)
        delta = means - mean
        squares += ((values - means[:, np.newaxis]) ** 2).sum(axis=1) + delta**2 * count * new / (count + new)
        mean += delta * new / (count + new)
        least, greatest = np.minimum(least, values.min(axis=1)), np.maximum(greatest, values.max(axis=1))
        count, done = count + new, done + len(chunk)
    return tuple(mean.tolist()), _divisors(np.sqrt(squares / count), least, greatest)
