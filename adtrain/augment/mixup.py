"""Mixup: weighted means of pairs of images and of their losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np

from adtrain import ops
from adtrain.augment.augmentation import Augmentation, Batch, Mixed
from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.core.types import Shape
from adtrain.option_types import Positive

CELLS = 1024
"""Intervals of equal probability in the quantile table; the error of a probability is at most one interval."""


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
