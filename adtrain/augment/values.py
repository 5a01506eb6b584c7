"""Augmentations that change the values of pixels: noise, cutout, colours, and mixtures of two images of the batch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cache
from math import sqrt
from typing import Annotated, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.augment.batch import Augmentation, Batch, Mixed, grid
from adtrain.core.array import Value, array
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import Bounds
from adtrain.core.types import Shape
from adtrain.ops.create import normal
from adtrain.option_types import NonNegative, Positive, Size

LUMA = (0.2989, 0.587, 0.114)
"""The weights of red, green and blue in the grey of a pixel, of ITU-R BT.601, as torchvision rounds them."""
WHITE = 255.0
"""The largest value of a pixel in images of bytes. Other images have no largest value."""
Turn = Annotated[float, Bounds(ge=0, le=0.5)]


@dataclass(frozen=True)
class ColorJitter(Augmentation):
    """Brightness, contrast, saturation and hue of each image, changed in this order.

    The formulas are torchvision's; torchvision draws the order. A random factor multiplies brightness, contrast and
    saturation: for brightness 0.4 it is within 1 - 0.4 and 1 + 0.4, and not below 0. Contrast is the distance from the
    mean grey of the image, saturation that from the grey of the pixel. The hue is turned by up to `hue` of a full
    circle in either direction. Pixels of images of bytes stay within 0 and 255.
    """

    _: KW_ONLY
    brightness: NonNegative = 0.0
    contrast: NonNegative = 0.0
    saturation: NonNegative = 0.0
    hue: Turn = 0.0

    def __post_init__(self) -> None:
        if self.brightness == self.contrast == self.saturation == self.hue == 0:
            options = "brightness, contrast, saturation or hue"
            raise OptionError(f"color_jitter: found nothing to do, expected {options} above 0")

    def check(self, shape: Shape) -> None:
        super().check(shape)
        of_colour = self.saturation > 0 or self.hue > 0
        if shape[1] != 3 and (shape[1] != 1 or of_colour):
            expected = "3 channels for saturation and hue" if of_colour else "1 or 3 channels"
            raise ShapeError(f"color_jitter: found images of shape {shape[1:]}, expected {expected}")

    def factor(self, rng: Value, name: str, strength: float, images: Value) -> Value:
        """A uniform number for each image, (N, 1, 1, 1), within 1 - `strength` and 1 + `strength`, and not below 0."""
        least, most = max(0.0, 1.0 - strength), 1.0 + strength
        return self.uniform(rng, name, (images.shape[0], 1, 1, 1), images) * (most - least) + least

    def turn(self, rng: Value, images: Value) -> Value:
        """A uniform number for each image, (N, 1, 1, 1), within ± `hue`."""
        return (self.uniform(rng, "hue", (images.shape[0], 1, 1, 1), images) * 2.0 - 1.0) * self.hue

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        images = batch.images
        of_bytes = batch.stored is not None and batch.stored.dtype == np.uint8

        def within(pixels: Value) -> Value:
            return ops.clip(pixels, 0.0, WHITE) if of_bytes else pixels

        if self.brightness:
            images = within(images * self.factor(rng, "brightness", self.brightness, images))
        if self.contrast:
            factor = self.factor(rng, "contrast", self.contrast, images)
            images = within(images * factor + ops.mean(grey(images), axis=(1, 2, 3), keepdims=True) * (1.0 - factor))
        if self.saturation:
            factor = self.factor(rng, "saturation", self.saturation, images)
            images = within(images * factor + grey(images) * (1.0 - factor))
        if self.hue:
            images = turned(images, self.turn(rng, images))
        return batch._replace(images=images)


def grey(images: Value) -> Value:
    """The grey of each pixel: (N, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    weights = array(np.array(LUMA, images.dtype).reshape(1, 3, 1, 1), device=images.device)
    return ops.sum(images * weights, axis=1, keepdims=True)


def turned(images: Value, turn: Value) -> Value:
    """Images (N, 3, H, W) with their hue turned by `turn`, (N, 1, 1, 1), in full circles.

    Hue, value and chroma are those of the HSV model: the largest channel is the value, and the chroma its distance from
    the smallest one. The hue has six sectors, of which each ends at a pure or a mixed colour.
    """
    count, _, height, width = images.shape
    red, green, blue = (ops.slice(images, [0, i, 0, 0], [count, i + 1, height, width]) for i in range(3))
    value = ops.maximum(ops.maximum(red, green), blue)
    chroma = value - ops.minimum(ops.minimum(red, green), blue)
    divisor = ops.where(ops.equal(chroma, 0.0), 1.0, chroma)
    of_red, of_green = (green - blue) / divisor, (blue - red) / divisor + 2.0
    of_blue = (red - green) / divisor + 4.0
    sector = ops.where(ops.equal(value, red), of_red, ops.where(ops.equal(value, green), of_green, of_blue))
    sector = sector + turn * 6.0

    def channel(first: float) -> Value:
        place = ops.remainder(sector + first, 6.0)
        return value - chroma * ops.clip(ops.minimum(place, 4.0 - place), 0.0, 1.0)

    return ops.concatenate([channel(5.0), channel(3.0), channel(1.0)], axis=1)


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


CELLS = 1024
"""Intervals of equal probability in the quantile table; the error of a probability is at most one interval."""


class Mixing(Augmentation):
    """Mixes each image with the next one of the batch, and its loss with the loss for the next one's label."""

    alpha: float

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape[0] < 2:
            raise ShapeError(f"{self.kind()}: found batches of 1 image, expected at least 2")

    def larger_share(self, rng: Value, images: Value) -> Value:
        """max(b, 1 - b) for b drawn from Beta(alpha, alpha): shape (), in [1/2, 1]."""
        table = array(larger_shares(self.alpha).astype(images.dtype), device=images.device)
        position = self.uniform(rng, "share", (), images) * CELLS
        cell = ops.astype(position, np.int64)
        low, high = ops.embedding(cell, table), ops.embedding(cell + 1, table)
        return low + (high - low) * (position - ops.astype(cell, position.dtype))

    def following(self, batch: Batch) -> Value:
        """For each image the index of the next one; the first one follows the last one. int64 (N,)."""
        return array(np.roll(np.arange(batch.images.shape[0]), -1), device=batch.labels.device)


@dataclass(frozen=True)
class Mixup(Mixing):
    """Each image is mixed with the next one of the batch, and its loss with the loss for the next one's label.

    H. Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018: the weights are b and 1 - b, where b is
    drawn from Beta(alpha, alpha) once for each batch. Here an image's own weight is the larger one, so that accuracy
    counts its own label. Batches are in random order, so this does not change the distribution of the mixtures.
    """

    for_images_only = False
    alpha: Positive = 0.2

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        share, following = self.larger_share(rng, batch.images), self.following(batch)
        images = batch.images * share + ops.embedding(following, batch.images) * (1.0 - share)
        return batch._replace(images=images, mixed=Mixed(ops.embedding(following, batch.labels), share))


class Box(NamedTuple):
    """Rows from `top` to before `bottom`, columns from `left` to before `right`: integers of the images' dtype, ()."""

    top: Value
    bottom: Value
    left: Value
    right: Value


@dataclass(frozen=True)
class Cutmix(Mixing):
    """A rectangle of each image is replaced by that of the next one of the batch, and its loss mixed with the next's.

    S. Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable features", ICCV 2019,
    as in torchvision: the sides are those of the image times the root of 1 - b, where b is drawn from Beta(alpha,
    alpha) once for each batch. The middle is a random pixel, and what lies outside of the image is cut off. The weight
    of the next image's label is the fraction of the area.
    """

    alpha: Positive = 1.0

    def box(self, rng: Value, images: Value) -> Box:
        """The rectangle, which all images of a batch share."""
        larger = self.larger_share(rng, images)
        share = ops.where(ops.less(self.uniform(rng, "which", (), images), 0.5), larger, 1.0 - larger)
        half = ops.sqrt(1.0 - share) * 0.5
        sides = []
        for name, length in (("row", images.shape[2]), ("column", images.shape[3])):
            middle = ops.floor(self.uniform(rng, name, (), images) * length)
            reach = ops.floor(half * length)
            sides += [ops.maximum(middle - reach, 0.0), ops.minimum(middle + reach, float(length))]
        return Box(*sides)

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        images, following = batch.images, self.following(batch)
        box, (rows, columns) = self.box(rng, images), grid(images, images.dtype)
        inside = (rows >= box.top) & (rows < box.bottom) & (columns >= box.left) & (columns < box.right)
        area = (box.bottom - box.top) * (box.right - box.left)
        share = 1.0 - area / float(images.shape[2] * images.shape[3])
        mixed = Mixed(ops.embedding(following, batch.labels), share)
        replaced = ops.where(ops.expand_dims(inside, 1), ops.embedding(following, images), images)
        return batch._replace(images=replaced, mixed=mixed)


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
