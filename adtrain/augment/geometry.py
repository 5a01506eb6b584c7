"""Geometric augmentations. Pixels from outside of an image are 0, black."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import NamedTuple

import numpy as np

from adtrain import ops
from adtrain.augment.augmentation import Augmentation, Batch
from adtrain.augment.sampling import bilinear, grid, pixels_at
from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.types import Shape
from adtrain.option_types import Count, Degrees, Fraction, Probability


@dataclass(frozen=True)
class Crop(Augmentation):
    """Each image, padded with `padding` black pixels on all sides and cropped to its size at a random position."""

    padding: Count = 4

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if self.padding >= min(shape[2:]):
            size = "x".join(map(str, shape[2:]))
            raise ShapeError(f"crop: padding is {self.padding}, expected less than the sides of an image, {size}")

    def corners(self, rng: Value, images: Value) -> tuple[Value, Value]:
        """The first row and column of each crop in the padded image: int32 (N, 1, 1) in [0, 2 padding]."""

        def corner(name: str) -> Value:
            position = self.uniform(rng, name, (images.shape[0], 1, 1), images) * (2 * self.padding + 1)
            return ops.astype(position, np.int32)

        return corner("row"), corner("column")

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        row, column = self.corners(rng, batch.images)
        rows, columns = grid(batch.images, np.int32)
        border = (self.padding, self.padding)
        padded = ops.pad(batch.images, ((0, 0), (0, 0), border, border))
        return batch._replace(images=pixels_at(padded, row + rows, column + columns))


@dataclass(frozen=True)
class Flip(Augmentation):
    """Each image flipped left to right with this probability."""

    probability: Probability = 0.5

    def chosen(self, rng: Value, images: Value) -> Value:
        """True for the images that are flipped: bool (N, 1, 1, 1)."""
        return ops.less(self.uniform(rng, "chosen", (images.shape[0], 1, 1, 1), images), self.probability)

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        images = batch.images
        return batch._replace(images=ops.where(self.chosen(rng, images), ops.flip(images, axis=3), images))


class Motion(NamedTuple):
    """An affine transform for each image; every field is (N, 1, 1).

    Attributes:
        angle: counter-clockwise rotation around the centre, in radians.
        factor: scale factor.
        down, right: translation in pixels, after rotation and scaling.
    """

    angle: Value
    factor: Value
    down: Value
    right: Value


@dataclass(frozen=True)
class Affine(Augmentation):
    """Random rotation, translation and scaling of each image, with bilinear interpolation.

    All are uniform: the angle within ± `rotation` degrees, the translation within ± `shift` times height and width, the
    scale factor within 1 ± `scale`.
    """

    rotation: Degrees = 0.0
    shift: Fraction = 0.0
    scale: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.rotation == self.shift == self.scale == 0:
            raise OptionError("affine: found nothing to do, expected rotation, shift or scale above 0")

    def motion(self, rng: Value, images: Value) -> Motion:
        """The random transform of each image."""
        count, _, height, width = images.shape

        def symmetric(name: str, bound: float) -> Value:
            return (self.uniform(rng, name, (count, 1, 1), images) * 2.0 - 1.0) * bound

        return Motion(
            symmetric("angle", self.rotation * pi / 180),
            symmetric("factor", self.scale) + 1.0,
            symmetric("down", self.shift * height),
            symmetric("right", self.shift * width),
        )

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        return batch._replace(images=affine_transform(batch.images, self.motion(rng, batch.images)))


def affine_transform(images: Value, motion: Motion) -> Value:
    """Images (N, C, H, W), transformed by inverse mapping: each output pixel is read at the position it came from."""
    middle_row, middle_column = ((n - 1) / 2 for n in images.shape[2:])
    rows, columns = grid(images, images.dtype)
    y, x = rows - (motion.down + middle_row), columns - (motion.right + middle_column)
    cos, sin = ops.cos(motion.angle) / motion.factor, ops.sin(motion.angle) / motion.factor
    return bilinear(images, y * cos + x * sin + middle_row, x * cos - y * sin + middle_column)
