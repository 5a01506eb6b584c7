"""Augmentations of pixel values: Gaussian noise and cutout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adtrain import ops
from adtrain.augment.augmentation import Augmentation, Batch
from adtrain.augment.sampling import grid
from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.core.types import Shape
from adtrain.ops.normal import normal
from adtrain.option_types import NonNegative, Size


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
