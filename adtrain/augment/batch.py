"""The batch of a step, the base class of random changes of it, and changes that draw new examples for each step."""

from __future__ import annotations

import re
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.core.options import CheckedArguments
from adtrain.core.types import Shape


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
        mixed: the labels and the weight that `Mixup` or `Cutmix` adds; None without it.
        stored: the images as the data set has them, without a change; None where `images` are those.
        epoch: the number of complete epochs: int64 ().
        kept: points (N, variables, 1, 1) at which equations had large residuals; None without them.
    """

    images: Value
    labels: Value
    unit: np.ndarray
    mixed: Mixed | None = None
    stored: Value | None = None
    epoch: Value | int = 0
    kept: Value | None = None


class Augmentation(CheckedArguments):
    """One random change. Subclasses are frozen dataclasses; their fields are the options."""

    for_images_only: ClassVar[bool] = True
    """True if the augmentation uses the positions of pixels; it then refuses tabular rows (F, 1, 1)."""

    def check(self, shape: Shape) -> None:
        """Raise ShapeError if the augmentation cannot take batches of `shape` (N, C, H, W)."""
        if self.for_images_only and shape[2:] == (1, 1):
            raise ShapeError(f"{self.kind()}: found rows of {shape[1]} numbers, expected images [C, H, W]")

    @classmethod
    def kind(cls) -> str:
        """The name in a config: `ColorJitter` is "color_jitter"."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def examples(self, indices: Value, count: int, rng: Value) -> Value:
        """The indices of the batch's examples, int64 (N,), below `count`; by default the given `indices` (N,)."""
        return indices

    @abstractmethod
    def __call__(self, batch: Batch, rng: Value) -> Batch:
        """The augmented batch; `rng` is `ops.rng_state(seed, step)`."""

    def uniform(self, rng: Value, name: str, shape: Shape, like: Value) -> Value:
        """Uniform numbers in [0, 1) with the dtype of `like`; each `name` has a random stream of its own."""
        return ops.random_uniform(rng, shape, self.stream(name), like.dtype)

    def stream(self, name: str) -> int:
        """The number of the random stream of this name."""
        return zlib.crc32(f"augment.{self.kind()}.{name}".encode())


def grid(images: Value, dtype: np.typing.DTypeLike) -> tuple[Value, Value]:
    """Row indices (1, H, 1) and column indices (1, 1, W) of images (N, C, H, W)."""
    rows, columns = (np.arange(n).astype(dtype) for n in images.shape[2:])
    return array(rows.reshape(1, -1, 1), device=images.device), array(columns.reshape(1, 1, -1), device=images.device)


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

    With `uniform_points` they are independent of one another. Otherwise they are the batch's, moved by a random vector
    modulo the box (Cranley and Patterson 1976), which keeps how evenly a set fills the box. The numbers depend on the
    seed, and on the step or the epoch unless `resample` is "never". From step, or epoch, `until` on they stay the same.
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
