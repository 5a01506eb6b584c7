"""What every augmentation is: an immutable description, and a pure function of a batch and of the random state."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.core import options
from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.core.types import Shape


class Mixed(NamedTuple):
    """What a batch shows besides itself: `labels` int64 (N,) with the weight 1 - `share`, which is of shape ()."""

    labels: Value
    share: Value


class Batch(NamedTuple):
    """The images and labels of one step.

    Attributes:
        images: (N, C, H, W) as the data set holds them, 0 being black; floating-point numbers for an augmentation.
        labels: int64 (N,).
        unit: what one unit of the model's input is in those of the images, for each channel: (C, 1, 1).
        mixed: what was mixed into the images.
    """

    images: Value
    labels: Value
    unit: np.ndarray
    mixed: Mixed | None = None


class Augmentation(ABC):
    """One random change. Subclasses are frozen dataclasses whose fields are the options."""

    for_images_only: ClassVar[bool] = True
    """Whether pixels must have neighbours, which the numbers of a row (F, 1, 1) have not."""

    @classmethod
    def kind(cls) -> str:
        """The name in a config."""
        return cls.__name__.lower()

    def check(self, shape: Shape) -> None:
        """ShapeError where batches of `shape` (N, C, H, W) cannot be changed so."""
        if self.for_images_only and shape[2:] == (1, 1):
            raise ShapeError(f"{self.kind()}: found rows of {shape[1]} numbers, expected images [C, H, W]")

    @abstractmethod
    def __call__(self, batch: Batch, rng: Value) -> Batch:
        """The changed batch; `rng` is `ops.rng_state(seed, step)`."""

    def uniform(self, rng: Value, name: str, shape: Shape, like: Value) -> Value:
        """Numbers in [0, 1) of the dtype of `like`; each name has a random stream of its own."""
        return ops.random_uniform(rng, shape, zlib.crc32(f"augment.{self.kind()}.{name}".encode()), like.dtype)

    def check_number(self, name: str, below: float = np.inf) -> None:
        """OptionError unless the field `name` is a finite number in [0, below)."""
        options.check_number(self.kind(), name, getattr(self, name), 0, below)
