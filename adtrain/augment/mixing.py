"""Augmentations that mix each image with the next one of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import NamedTuple

import numpy as np

from adtrain import ops
from adtrain.augment.batch import Augmentation, Batch, Mixed, grid
from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.core.types import Shape
from adtrain.option_types import Positive

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
