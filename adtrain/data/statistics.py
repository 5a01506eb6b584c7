"""Mean and standard deviation of each channel, computed in chunks because images may be larger than memory."""

from __future__ import annotations

import math

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.split import Images, chunks

PIXEL_MAX = 255
# A standard deviation below this fraction of the mean is rounding error of a constant channel, or target in float64.
CONSTANT_CHANNEL, CONSTANT_TARGET = 1e-6, 1e-12

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def channel_statistics(images: Images, name: str = "images") -> Statistics:
    """Per-channel mean and standard deviation of images (N, C, H, W): of uint8 / 255, or of unscaled float32.

    A constant channel has standard deviation 1, so that it can be divided by. Raises DataError, with `name` and the
    row, if a number is not finite.
    """
    if images.dtype == np.uint8:
        return _of_pixels(images)
    return _of_numbers(images, name)


def target_statistics(labels: np.ndarray) -> Statistics:
    """Mean and standard deviation of each column of numbers to predict (N, targets); 1 for a constant column."""
    mean, std = labels.mean(axis=0), labels.std(axis=0)
    return tuple(mean.tolist()), tuple(np.where(std > CONSTANT_TARGET * np.abs(mean), std, 1.0).tolist())


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
    for chunk in chunks(images):
        values = chunk.astype(np.float64).swapaxes(0, 1).reshape(images.shape[1], -1)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(chunk).reshape(len(chunk), -1).all(axis=1))[0])
            raise DataError(f"{name}: found a number that is not finite in row {done + row}, expected finite ones")
        new, means = values.shape[1], values.mean(axis=1)
        delta = means - mean
        squares += ((values - means[:, np.newaxis]) ** 2).sum(axis=1) + delta**2 * count * new / (count + new)
        mean += delta * new / (count + new)
        count, done = count + new, done + len(chunk)
    std = np.sqrt(squares / count)
    return tuple(mean.tolist()), tuple(np.where(std > CONSTANT_CHANNEL * np.abs(mean), std, 1.0).tolist())
