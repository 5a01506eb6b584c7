"""New examples for each step: points of a box, points from a fixed set, or elements of a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from adtrain import ops
from adtrain.augment.batch import Augmentation, Batch
from adtrain.core.array import Value, array


@dataclass(frozen=True)
class Drawn(Augmentation):
    """Each step draws its examples independently and uniformly, and does not follow the order of an epoch."""

    for_images_only = False

    def examples(self, indices: Value, count: int, rng: Value) -> Value:
        numbers = ops.random_uniform(rng, indices.shape, self.stream("examples"), np.float64)
        return ops.minimum(ops.astype(numbers * count, np.int64), count - 1)  # a product can be rounded up to count

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        return batch


@dataclass(frozen=True)
class Resampled(Augmentation):
    """Points (N, variables, 1, 1) in place of the batch's.

    With `uniform` they are independent of one another. Otherwise they are the batch's, moved by a random vector modulo
    the box (Cranley and Patterson 1976), which keeps how evenly a set fills the box. The numbers depend on the seed,
    and on the step or the epoch unless `resample` is "never". From step, or epoch, `until` on they stay the same.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    uniform_points: bool
    resample: Literal["step", "epoch", "never"] = "step"
    until: int | None = None

    for_images_only = False

    def __call__(self, batch: Batch, rng: Value) -> Batch:
        points = batch.images
        low, high = (
            array(np.array(x, points.dtype).reshape(1, -1, 1, 1), device=points.device) for x in (self.low, self.high)
        )
        span, state = high - low, self._state(batch, rng)
        if self.uniform_points:
            return batch._replace(images=low + span * self.uniform(state, "points", points.shape, points))
        moved = points + span * self.uniform(state, "shift", (1, points.shape[1], 1, 1), points)
        return batch._replace(images=ops.where(moved < high, moved, moved - span))

    def _state(self, batch: Batch, rng: Value) -> Value:
        """The random state of a draw. The number of the step is that of the epoch or 0, unless each step draws anew."""
        step = rng[2:3]
        if self.resample == "never":
            number = ops.zeros_like(step)
        elif self.resample == "epoch" and isinstance(batch.epoch, Value):
            number = ops.reshape(ops.astype(batch.epoch, np.uint32), (1,))
        else:
            number = step
        if self.until is not None:
            number = ops.minimum(number, self.until)
        return ops.concatenate([rng[:2], number, ops.zeros_like(number)])
