"""Photographs of digits in the form of MNIST's images: light ink on a black background, scaled and centred.

https://yann.lecun.com/exdb/mnist describes that form: each digit was scaled to fit into 20 x 20 pixels, with its aspect
ratio, and placed so that its centre of mass is the centre of 28 x 28 pixels. Needs Pillow.
"""

from __future__ import annotations

import numpy as np

from adtrain.data.errors import DataError

LIGHT, DARK = 0.7, 0.3
"""Means of training images, as fractions of white, that count as a light and as a dark background."""

BOX = 20 / 28
"""The longer side of a digit's box, as a fraction of the image's."""

LEAST_CONTRAST = 32
"""The least difference between ink and background, of 255."""

PAPER, INK = 0.25, 0.75
"""Fractions of the contrast: paper is below the first one, full ink above the second one."""


def looks_inverted(image: np.ndarray, mean: float) -> bool:
    """Whether the border of a grey image, uint8 (1, H, W), is light and training images are dark, or the reverse.

    `mean` is that of the training images, as a fraction of white. False where they are neither light nor dark.
    """
    return (mean < DARK and has_light_background(image)) or (mean > LIGHT and not has_light_background(image))


def has_light_background(image: np.ndarray) -> bool:
    """Whether the border of a grey image, uint8 (1, H, W), is lighter than half of white."""
    return _background(image[0]) > 127.5


def centred(image: np.ndarray, height: int, width: int, place: str) -> np.ndarray:
    """The digit in a grey image, uint8 (1, H, W) of light ink on a dark background, as uint8 (1, height, width).

    The background becomes black and the ink white. Raises DataError that names `place` where there is no ink.
    """
    from PIL import Image

    pixels = image[0].astype(np.float64)
    background = _background(image[0])
    contrast = pixels.max() - background
    if contrast < LEAST_CONTRAST:
        raise DataError(f"{place}: found an image without contrast, expected a digit; --center no takes it as it is")
    ink = np.clip(((pixels - background) / contrast - PAPER) / (INK - PAPER), 0, 1)
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = min(BOX * height / box.shape[0], BOX * width / box.shape[1])
    size = max(1, round(box.shape[1] * scale)), max(1, round(box.shape[0] * scale))
    small = Image.fromarray((255 * box).astype(np.uint8)).resize(size, Image.Resampling.BILINEAR)
    digit = np.asarray(small)
    field = np.zeros((1, height, width), np.uint8)
    top, left = (
        min(max(round(length / 2 - 0.5 - mass), 0), length - extent)
        for length, mass, extent in zip((height, width), _centre_of_mass(digit), digit.shape, strict=True)
    )
    field[0, top : top + digit.shape[0], left : left + digit.shape[1]] = digit
    return field


def _background(pixels: np.ndarray) -> float:
    """The median of the border's pixels."""
    return float(np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])))


def _centre_of_mass(pixels: np.ndarray) -> tuple[float, float]:
    """(row, column), weighted by the pixels."""
    weights = pixels.astype(np.float64)
    total = max(weights.sum(), 1)
    return (
        float(weights.sum(axis=1) @ np.arange(len(pixels)) / total),
        float(weights.sum(axis=0) @ np.arange(pixels.shape[1]) / total),
    )
