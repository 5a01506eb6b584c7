"""Changes of where pixels lie. What comes from outside of an image is 0, black."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import NamedTuple

import numpy as np

from adtrain import ops
from adtrain.augment.augmentation import Augmentation, Batch
from adtrain.augment.sampling import bilinear, grid, pixels_at
from adtrain.core import options
from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.types import Shape


@dataclass(frozen=True)
class Crop(Augmentation):
    """Each image with `padding` black pixels on all sides, cut back to its size at a random place."""

    padding: int = 4

    def __post_init__(self) -> None:
        options.check_integer(self.kind(), "padding", self.padding, 0)

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if self.padding >= min(shape[2:]):
            size = "x".join(map(str, shape[2:]))
            raise ShapeError(f"crop: padding {self.padding} can leave nothing of an image of {size}, expected less")

    def corners(self, rng: Value, images: Value) -> tuple[Value, Value]:
        """First row and first column of each cut in the padded image: int32 (N, 1, 1) in [0, 2 padding]."""

        def first(name: str) -> Value:
            place = self.uniform(rng, name, (images.shape[0], 1, 1), images) * (2 * self.padding + 1)
            return ops.astype(place, np.int32)

        return first("row"), first("column")

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        row, column = self.corners(rng, batch.images)
        rows, columns = grid(batch.images, np.int32)
        around = (self.padding, self.padding)
        padded = ops.pad(batch.images, ((0, 0), (0, 0), around, around))
        return batch._replace(images=pixels_at(padded, row + rows, column + columns))


@dataclass(frozen=True)
class Flip(Augmentation):
    """Left and right exchanged, in each image with this probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        self.check_number("probability")
        if self.probability > 1:
            raise OptionError(f"flip: probability is {self.probability!r}, expected at most 1")

    def chosen(self, rng: Value, images: Value) -> Value:
        """Which images are flipped: bool (N, 1, 1, 1)."""
        return ops.less(self.uniform(rng, "chosen", (images.shape[0], 1, 1, 1), images), self.probability)

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        images = batch.images
        return batch._replace(images=ops.where(self.chosen(rng, images), ops.flip(images, axis=3), images))


class Motion(NamedTuple):
    """How images move, each (N, 1, 1).

    Attributes:
        angle: radians that they turn around their middle, against the clock.
        factor: how many times as large they become.
        down, right: pixels that they move after that.
    """

    angle: Value
    factor: Value
    down: Value
    right: Value


@dataclass(frozen=True)
class Affine(Augmentation):
    """Each image turned, moved and scaled at random, bilinear in between pixels.

    It turns by up to `rotation` degrees, moves by up to the part `shift` of its height and width, and becomes larger or
    smaller by up to the part `scale`; all are uniform, in both directions.
    """

    rotation: float = 0.0
    shift: float = 0.0
    scale: float = 0.0

    def __post_init__(self) -> None:
        self.check_number("rotation")
        self.check_number("shift", below=1)
        self.check_number("scale", below=1)
        if self.rotation == self.shift == self.scale == 0:
            raise OptionError("affine: found nothing to do, expected rotation, shift or scale above 0")

    def motion(self, rng: Value, images: Value) -> Motion:
        """How each of the images moves."""
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
        return batch._replace(images=moved(batch.images, self.motion(rng, batch.images)))


def moved(images: Value, motion: Motion) -> Value:
    """Images (N, C, H, W) that move as `motion` says; each pixel of the result finds out where it came from."""
    middle_row, middle_column = ((n - 1) / 2 for n in images.shape[2:])
    rows, columns = grid(images, images.dtype)
    y, x = rows - (motion.down + middle_row), columns - (motion.right + middle_column)
    cos, sin = ops.cos(motion.angle) / motion.factor, ops.sin(motion.angle) / motion.factor
    return bilinear(images, y * cos + x * sin + middle_row, x * cos - y * sin + middle_column)
