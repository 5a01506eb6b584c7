"""The batch of a step, and the base class of the random changes of it."""

from __future__ import annotations

import re
import zlib
from abc import abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.core.array import Value
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
