"""Mixing of images and labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np

from adtrain import ops
from adtrain.augment.augmentation import Augmentation, Batch, Mixed
from adtrain.core.array import Value, array
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.types import Shape

CELLS = 1024
"""Parts of equal probability in the table of a distribution: no probability is wrong by more than one of them."""


@dataclass(frozen=True)
class Mixup(Augmentation):
    """Each image mixed with the next one of the batch, and its loss with the loss for the next one's label.

    H. Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018: the shares are b and 1 - b, with one b of
    the distribution Beta(alpha, alpha) for the batch. An image keeps the larger share: batches are in random order, so
    mixtures are as frequent as without that rule, and the label that outputs are compared with is its own.
    """

    for_images_only = False
    alpha: float = 0.2

    def __post_init__(self) -> None:
        self.check_number("alpha")
        if self.alpha == 0:
            raise OptionError("mixup: alpha is 0, expected a number above 0")

    def check(self, shape: Shape) -> None:
        if shape[0] < 2:
            raise ShapeError("mixup: found batches of 1 image, expected at least 2")

    def share(self, rng: Value, images: Value) -> Value:
        """The images' own share, of shape (), in [1/2, 1]."""
        table = array(larger_shares(self.alpha).astype(images.dtype), device=images.device)
        place = self.uniform(rng, "share", (), images) * CELLS
        cell = ops.astype(place, np.int64)
        low, high = ops.embedding(cell, table), ops.embedding(cell + 1, table)
        return low + (high - low) * (place - ops.astype(cell, place.dtype))

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        count, share = batch.images.shape[0], self.share(rng, batch.images)
        following = array(np.roll(np.arange(count), -1), device=batch.labels.device)
        images = batch.images * share + ops.embedding(following, batch.images) * (1.0 - share)
        return batch._replace(images=images, mixed=Mixed(ops.embedding(following, batch.labels), share))


@cache
def larger_shares(alpha: float) -> np.ndarray:
    """The quantiles of max(b, 1 - b), b of Beta(alpha, alpha), at 0, 1 / CELLS, ..., 1: float64, ascending from 1/2.

    The density of the smaller share s = exp(-t) / 2 is proportional to (s (1 - s))^(alpha - 1) ds, so that of t to
    (s (1 - s))^alpha / (1 - s) dt: smooth, and without weight beyond the last t, for every alpha. The
    last one is not at 1 but a quarter of a cell before it: a long tail is no straight line.
    """
    t = np.linspace(0, 40 / alpha + 10 / sqrt(alpha), 1 << 17)
    smaller = np.exp(-t) / 2
    log_density = alpha * (np.log1p(-smaller) - t) - np.log1p(-smaller)
    density = np.exp(log_density - log_density.max())
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    probabilities = np.append(np.arange(CELLS), CELLS - 0.25) / CELLS
    return 1 - np.exp(-np.interp(probabilities * cumulative[-1], cumulative, t)) / 2
