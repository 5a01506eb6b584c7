"""Augmentations that move pixels: crops, flips and affine transforms; and pixels at given positions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from math import log, pi
from typing import Annotated, Literal, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.augment.batch import Augmentation, Batch, grid
from adtrain.core.array import Value, array
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import Bounds
from adtrain.core.types import Shape
from adtrain.core.vmap import vmap
from adtrain.option_types import Count, Degrees, Fraction, Positive, Probability

ATTEMPTS = 10
"""Sizes that are drawn for a random resized crop, until one fits into the image."""
Area = Annotated[float, Bounds(gt=0, le=1)]


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
    return interpolated(padded, (y, y + 1), (x, x + 1), down, right)


def interpolated(
    images: Value, rows: tuple[Value, Value], columns: tuple[Value, Value], down: Value, right: Value
) -> Value:
    """Between four pixels of images (N, C, H, W), which are in the two rows and the two columns: (N, C, h, w).

    The result is at the fraction `down` of the way from the first row to the second one, and `right` between columns.
    """
    above, below = (
        _lerp(pixels_at(images, row, columns[0]), pixels_at(images, row, columns[1]), right) for row in rows
    )
    return _lerp(above, below, down)


def reflected(positions: Value, length: int) -> Value:
    """Integers from -(length - 1) to 2 (length - 1) as positions of an axis, which is mirrored at its first and last
    pixel, as by `numpy.pad` in the mode "reflect"."""
    last = length - 1
    return last - ops.abs(last - ops.abs(positions))


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


class Move(Augmentation):
    """An augmentation that takes each pixel from one place of its image.

    `moved` composes several of them, and gathers each pixel once, from the data set.
    """

    @property
    def leaves_image(self) -> bool:
        """Whether a place can be outside of the image, where pixels are black."""
        return False

    @abstractmethod
    def sources(self, rng: Value, batch: Batch, rows: Value, columns: Value) -> tuple[Value, Value]:
        """Where the pixels at `rows` (N or 1, H, 1) and `columns` (N or 1, 1, W) come from: int32 of such shapes."""

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        places = self.sources(rng, batch, *grid(batch.images, np.int32))
        return batch._replace(images=pixels_at(batch.images, *places))


def leading_moves(augmentations: Sequence[Augmentation]) -> list[Move]:
    """The augmentations at the beginning that `moved` composes.

    A single crop with black padding is not composed: it is one gather from padded images.
    """
    found = list(takewhile(lambda change: isinstance(change, Move), augmentations))
    moves = [change for change in found if isinstance(change, Move)]
    return [] if len(moves) == 1 and moves[0].leaves_image else moves


def moved(batch: Batch, moves: Sequence[Move], rng: Value, data: Value, indices: Value) -> Value:
    """The images of a batch after `moves`, as they are stored: rows `indices` (N,) of `data` (examples, C, H, W).

    Each pixel is one element that is gathered from `data`, so there are no images between two moves.
    """
    count, channels, height, width = batch.images.shape
    rows, columns = grid(batch.images, np.int32)
    black = None
    for move in reversed(moves):  # from a pixel of the result to where it comes from
        rows, columns = move.sources(rng, batch, rows, columns)
        if move.leaves_image:
            outside = (rows < 0) | (rows >= height) | (columns < 0) | (columns >= width)
            black = outside if black is None else black | outside
            rows, columns = ops.clip(rows, 0, height - 1), ops.clip(columns, 0, width - 1)
    kind = np.uint32 if data.size < 2**32 else np.int64
    pixels = ops.expand_dims(ops.astype(rows * width + columns, kind), 1)
    channel = array(np.arange(channels, dtype=kind).reshape(1, -1, 1, 1), device=data.device)
    images = ops.reshape(ops.astype(indices, kind), (count, 1, 1, 1))
    places = (images * channels + channel) * (height * width) + pixels
    found = ops.embedding(places, ops.reshape(data, (-1,)))
    return found if black is None else ops.where(ops.expand_dims(black, 1), 0, found)


@dataclass(frozen=True)
class Crop(Move):
    """Each image, padded with `padding` pixels on all sides and cropped to its size at a random position.

    The pixels of the padding are black, or those of the image, mirrored at its first and last row and column.
    """

    padding: Count = 4
    _: KW_ONLY
    padding_mode: Literal["constant", "reflect"] = "constant"

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

    @property
    def leaves_image(self) -> bool:
        return self.padding_mode == "constant"

    def sources(self, rng: Value, batch: Batch, rows: Value, columns: Value) -> tuple[Value, Value]:
        row, column = self.corners(rng, batch.images)
        rows, columns = row + rows - self.padding, column + columns - self.padding
        if self.padding_mode == "constant":
            return rows, columns
        height, width = batch.images.shape[2:]
        return reflected(rows, height), reflected(columns, width)

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        if not self.leaves_image:
            return super().__call__(batch, rng)
        row, column = self.corners(rng, batch.images)
        rows, columns = grid(batch.images, np.int32)
        border = (self.padding, self.padding)
        padded = ops.pad(batch.images, ((0, 0), (0, 0), border, border))
        return batch._replace(images=pixels_at(padded, row + rows, column + columns))


@dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """A random part of each image, resized to the image's size, with bilinear interpolation.

    C. Szegedy et al., "Going deeper with convolutions", CVPR 2015. The part has a random fraction of the area, within
    `scale`, and a random ratio of width to height, whose logarithm is uniform, within `ratio`. If it does not fit, it
    is drawn again, up to ATTEMPTS times; then it is the largest one in the middle with a ratio in the interval, as in
    torchvision. There is no antialiasing.
    """

    scale: tuple[Area, Area] = (0.08, 1.0)
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                raise OptionError(f"random_resized_crop: {name} is [{low}, {high}], expected the lower number first")

    def windows(self, rng: Value, images: Value) -> tuple[Value, Value, Value, Value]:
        """Top, left, height and width of each part, in pixels: float64 (N, 1, 1), whole numbers."""
        count, _, height, width = images.shape

        def drawn(name: str, number: int) -> Value:
            return ops.astype(self.uniform(rng, name, (count, number), images), np.float64)

        (least, most), (narrow, wide) = self.scale, self.ratio
        area = (drawn("area", ATTEMPTS) * (most - least) + least) * float(height * width)
        ratio = ops.exp(drawn("ratio", ATTEMPTS) * (log(wide) - log(narrow)) + log(narrow))
        widths, heights = ops.round(ops.sqrt(area * ratio)), ops.round(ops.sqrt(area / ratio))
        fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
        first = ops.expand_dims(ops.argmax(ops.astype(fits, np.float32), axis=1), 1)

        middle_width = min(width, max(1, round(height * wide)))
        middle_height = min(height, max(1, round(width / narrow)))

        def chosen(sizes: Value, otherwise: int) -> Value:
            found = ops.where(fits, sizes, float(otherwise))  # where none fits, `first` is 0
            return ops.take_along_axis(found, first, axis=1)

        h, w = chosen(heights, middle_height), chosen(widths, middle_width)
        found = ops.any(fits, axis=1, keepdims=True)
        top = ops.where(found, ops.floor(drawn("row", 1) * (height - h + 1)), float((height - middle_height) // 2))
        left = ops.where(found, ops.floor(drawn("column", 1) * (width - w + 1)), float((width - middle_width) // 2))
        top, left, h, w = (ops.expand_dims(x, 2) for x in (top, left, h, w))
        return top, left, h, w

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        images = batch.images
        top, left, height, width = self.windows(rng, images)
        rows, columns = grid(images, np.float64)

        def cells(positions: Value, first: Value, size: Value, length: int) -> tuple[tuple[Value, Value], Value]:
            """The two pixels around each position, in a part that is resized from `size` to `length`."""
            inside = ops.minimum(ops.maximum((positions + 0.5) * (size / length) - 0.5, 0.0), size - 1)
            low = ops.floor(inside)
            high = ops.minimum(low + 1, size - 1)
            fraction = ops.expand_dims(ops.astype(inside - low, images.dtype), 1)
            return (ops.astype(first + low, np.int32), ops.astype(first + high, np.int32)), fraction

        vertical, down = cells(rows, top, height, images.shape[2])
        horizontal, right = cells(columns, left, width, images.shape[3])
        return batch._replace(images=interpolated(images, vertical, horizontal, down, right))


@dataclass(frozen=True)
class Flip(Move):
    """Each image flipped left to right with this probability.

    With `alternate`, half of the images are flipped in the first epoch, the other half in the second one, and so on: K.
    Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024. Which half an image is in depends on the seed and
    on its pixels.
    """

    probability: Probability = 0.5
    _: KW_ONLY
    alternate: bool = False

    def __post_init__(self) -> None:
        if self.alternate and self.probability != 0.5:
            raise OptionError(f"flip: probability is {self.probability}, expected 0.5 with alternate")

    def chosen(self, rng: Value, batch: Batch) -> Value:
        """True for the images that are flipped: bool (N, 1, 1)."""
        if not self.alternate:
            drawn = self.uniform(rng, "chosen", (batch.images.shape[0], 1, 1), batch.images)
            return ops.less(drawn, self.probability)
        first = ops.astype(ops.less(self._of_pixels(rng, batch), 0.5), np.int64)
        return ops.reshape(ops.equal(first, 1 - batch.epoch % 2), (-1, 1, 1))

    def _of_pixels(self, rng: Value, batch: Batch) -> Value:
        """A uniform number for each image, (N,), that depends on the seed and on the sum of its pixels.

        The sum is one of integers, so no order of its terms changes it.
        """
        pixels = batch.images if batch.stored is None else batch.stored
        if pixels.dtype.kind == "f":
            pixels = ops.clip(pixels * 256.0, -(2.0**31), 2.0**31)
            pixels = ops.astype(pixels, np.int64)
        total = ops.reshape(ops.sum(pixels, axis=(1, 2, 3)), (-1, 1))
        word = array(np.arange(4).reshape(1, 4), device=total.device)
        of_seed = ops.where(word < 2, ops.reshape(rng, (1, 4)), 0)
        states = ops.where(ops.equal(word, 2), ops.astype(total, np.uint32), of_seed)
        return vmap(lambda state: self.uniform(state, "first", (), batch.images))(states)

    def sources(self, rng: Value, batch: Batch, rows: Value, columns: Value) -> tuple[Value, Value]:
        return rows, ops.where(self.chosen(rng, batch), batch.images.shape[3] - 1 - columns, columns)


@dataclass(frozen=True)
class VerticalFlip(Move):
    """Each image flipped upside down with this probability."""

    probability: Probability = 0.5

    def sources(self, rng: Value, batch: Batch, rows: Value, columns: Value) -> tuple[Value, Value]:
        drawn = self.uniform(rng, "chosen", (batch.images.shape[0], 1, 1), batch.images)
        return ops.where(ops.less(drawn, self.probability), batch.images.shape[2] - 1 - rows, rows), columns


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
