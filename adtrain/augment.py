"""Data augmentation: random changes of a batch, made of operations, so that they are traced with the training step.

Typical use:

    batch = augment.Batch(images, labels, unit)
    for change in (augment.Crop(4), augment.Flip(), augment.Mixup(0.2)):
        batch = change(batch, rng)

Pixels from outside of an image are 0, black. Random numbers depend only on `rng` (seed and step) and on the
augmentation's name, not on the other augmentations or their order. A resumed run draws the same numbers as an
uninterrupted one.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from math import pi, sqrt
from typing import ClassVar, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.checked_arguments import CheckedArguments
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.types import Shape
from adtrain.ops.normal import normal
from adtrain.option_types import Count, Degrees, Fraction, NonNegative, Positive, Probability, Size

CELLS = 1024
"""Intervals of equal probability in the quantile table; the error of a probability is at most one interval."""


class Mixed(NamedTuple):
    """The labels of the images mixed in, int64 (N,). Their weight is 1 - `share`; `share` has shape ()."""

    labels: Value
    share: Value


class Batch(NamedTuple):
    """The images and labels of one step.

    Attributes:
        images: (N, C, H, W) before normalisation, 0 is black; floating-point when an augmentation is called.
        labels: int64 (N,).
        unit: the size of one unit of the model's input in units of `images`, for each channel: (C, 1, 1).
        mixed: the labels and the weight that `Mixup` adds; None without it.
    """

    images: Value
    labels: Value
    unit: np.ndarray
    mixed: Mixed | None = None


class Augmentation(CheckedArguments):
    """One random change. Subclasses are frozen dataclasses; their fields are the options."""

    for_images_only: ClassVar[bool] = True
    """True if the augmentation uses the positions of pixels; it then refuses tabular rows (F, 1, 1)."""

    def check(self, shape: Shape) -> None:
        """Raise ShapeError if the augmentation cannot take batches of `shape` (N, C, H, W)."""
        if self.for_images_only and shape[2:] == (1, 1):
            raise ShapeError(f"{self.kind()}: found rows of {shape[1]} numbers, expected images [C, H, W]")

    @abstractmethod
    def __call__(self, batch: Batch, rng: Value) -> Batch:
        """The augmented batch; `rng` is `ops.rng_state(seed, step)`."""

    def uniform(self, rng: Value, name: str, shape: Shape, like: Value) -> Value:
        """Uniform numbers in [0, 1) with the dtype of `like`; each `name` has a random stream of its own."""
        return ops.random_uniform(rng, shape, zlib.crc32(f"augment.{self.kind()}.{name}".encode()), like.dtype)


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


@dataclass(frozen=True)
class Noise(Augmentation):
    """Gaussian noise on every number; `deviation` is its standard deviation in units of the model's input.

    With `data.normalize` this unit is the standard deviation of the channel.
    """

    for_images_only = False
    deviation: NonNegative = 0.05

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        with np.errstate(over="ignore"):  # infinity ends the run with an error that names the operation
            deviation = (self.deviation * batch.unit).astype(batch.images.dtype)
        drawn = normal(self.uniform(rng, "normal", batch.images.shape, batch.images))
        return batch._replace(images=batch.images + drawn * deviation)


@dataclass(frozen=True)
class Cutout(Augmentation):
    """One black square of `size` x `size` pixels in each image, around a random pixel; it may lie partly outside.

    T. DeVries and G. Taylor, "Improved regularization of convolutional neural networks with cutout", 2017.
    """

    size: Size = 8

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if self.size > min(shape[2:]):
            raise ShapeError(f"cutout: size {self.size} is larger than an image of {'x'.join(map(str, shape[2:]))}")

    def middles(self, rng: Value, images: Value) -> tuple[Value, Value]:
        """Row and column of the middle of each square, (N, 1, 1): a pixel's index, less 0.5 if `size` is even."""

        def middle(name: str, length: int) -> Value:
            position = self.uniform(rng, name, (images.shape[0], 1, 1), images) * length
            return ops.astype(ops.astype(position, np.int32), images.dtype) - (0.5 if self.size % 2 == 0 else 0.0)

        return middle("row", images.shape[2]), middle("column", images.shape[3])

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        images = batch.images
        rows, columns = grid(images, images.dtype)
        row, column = self.middles(rng, images)
        distance = ops.maximum(ops.abs(rows - row), ops.abs(columns - column))
        cut = ops.expand_dims(ops.less(distance, self.size / 2), 1)
        return batch._replace(images=ops.where(cut, 0.0, images))


@dataclass(frozen=True)
class Mixup(Augmentation):
    """Each image is mixed with the next one of the batch, and its loss with the loss for the next one's label.

    H. Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018: the weights are b and 1 - b, where b is
    drawn from Beta(alpha, alpha) once for each batch. Here an image's own weight is the larger one, so that accuracy
    counts its own label. Batches are in random order, so this does not change the distribution of the mixtures.
    """

    for_images_only = False
    alpha: Positive = 0.2

    def check(self, shape: Shape) -> None:
        if shape[0] < 2:
            raise ShapeError("mixup: found batches of 1 image, expected at least 2")

    def share(self, rng: Value, images: Value) -> Value:
        """The weight of an image's own pixels and label: shape (), in [1/2, 1]."""
        table = array(larger_shares(self.alpha).astype(images.dtype), device=images.device)
        position = self.uniform(rng, "share", (), images) * CELLS
        cell = ops.astype(position, np.int64)
        low, high = ops.embedding(cell, table), ops.embedding(cell + 1, table)
        return low + (high - low) * (position - ops.astype(cell, position.dtype))

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        count, share = batch.images.shape[0], self.share(rng, batch.images)
        following = array(np.roll(np.arange(count), -1), device=batch.labels.device)
        images = batch.images * share + ops.embedding(following, batch.images) * (1.0 - share)
        return batch._replace(images=images, mixed=Mixed(ops.embedding(following, batch.labels), share))


@cache
def larger_shares(alpha: float) -> np.ndarray:
    """Quantiles of max(b, 1 - b) for b ~ Beta(alpha, alpha): float64 (CELLS + 1,), ascending from 1/2.

    They are at the probabilities 0, 1 / CELLS, ..., 1, except that the last is a quarter of a cell below 1: linear
    interpolation up to the end of a long tail would be too far off.

    The integral runs over t, where s = exp(-t) / 2 is the smaller weight. The density of s is proportional to
    (s (1 - s))^(alpha - 1), so that of t is proportional to (s (1 - s))^alpha / (1 - s). It is smooth, and negligible
    beyond the last t, for every alpha.
    """
    t = np.linspace(0, 40 / alpha + 10 / sqrt(alpha), 1 << 17)
    smaller = np.exp(-t) / 2
    log_density = alpha * (np.log1p(-smaller) - t) - np.log1p(-smaller)
    density = np.exp(log_density - log_density.max())
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    probabilities = np.append(np.arange(CELLS), CELLS - 0.25) / CELLS
    return 1 - np.exp(-np.interp(probabilities * cumulative[-1], cumulative, t)) / 2


def grid(images: Value, dtype: np.typing.DTypeLike) -> tuple[Value, Value]:
    """Row indices (1, H, 1) and column indices (1, 1, W) of images (N, C, H, W)."""
    rows, columns = (np.arange(n).astype(dtype) for n in images.shape[2:])
    return array(rows.reshape(1, -1, 1), device=images.device), array(columns.reshape(1, 1, -1), device=images.device)


def pixels_at(images: Value, rows: Value, columns: Value) -> Value:
    """Pixels (N, C, h, w) of images (N, C, H, W) at `rows` and `columns`, integers that broadcast to (N, h, w)."""
    count, channels, height, width = images.shape
    flat = ops.astype(rows * width + columns, np.uint32)  # unsigned, so that no index counts from the end
    size = flat.shape[1] * flat.shape[2]
    index = ops.broadcast_to(ops.reshape(flat, (count, 1, size)), (count, channels, size))
    found = ops.take_along_axis(ops.reshape(images, (count, channels, height * width)), index, axis=2)
    return ops.reshape(found, (count, channels, *flat.shape[1:]))


def bilinear(images: Value, rows: Value, columns: Value) -> Value:
    """Images (N, C, H, W) at real positions `rows`, `columns` (N, H, W), bilinearly interpolated; outside is 0.

    Source: M. Jaderberg et al., "Spatial transformer networks", NeurIPS 2015.
    """
    height, width = images.shape[2:]
    padded = ops.pad(images, ((0, 0), (0, 0), (1, 2), (1, 2)))
    (y, down), (x, right) = _cell(rows, height), _cell(columns, width)
    above, below = (_lerp(pixels_at(padded, row, x), pixels_at(padded, row, x + 1), right) for row in (y, y + 1))
    return _lerp(above, below, down)


def _cell(positions: Value, length: int) -> tuple[Value, Value]:
    """Split positions along an axis of `length` pixels into a pixel index and a fraction.

    The index, int32 (N, H, W), counts in the axis padded by one 0 in front and two behind. The fraction is (N, 1, H, W)
    in [0, 1). Positions more than a pixel outside are clamped.
    """
    inside = ops.clip(positions, -1.0, float(length)) + 1.0
    first = ops.astype(inside, np.int32)
    return first, ops.expand_dims(inside - ops.astype(first, inside.dtype), 1)


def _lerp(a: Value, b: Value, fraction: Value) -> Value:
    return a + (b - a) * fraction


AUGMENTATIONS: dict[str, type[Augmentation]] = {
    change.kind(): change for change in (Crop, Flip, Affine, Noise, Cutout, Mixup)
}
"""Augmentations by their name in a config."""
