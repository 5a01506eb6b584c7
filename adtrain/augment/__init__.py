"""Data augmentation: random changes of a batch, made of operations, so that they are traced with the training step.

Typical use:

    batch = augment.Batch(images, labels, unit)
    for change in (augment.Crop(4), augment.Flip(), augment.Mixup(0.2)):
        batch = change(batch, rng)

Random numbers depend only on `rng` (seed and step) and on the augmentation's name, not on the other augmentations or
their order. A resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

from adtrain.augment.augmentation import Augmentation, Batch, Mixed
from adtrain.augment.geometry import Affine, Crop, Flip
from adtrain.augment.mixup import Mixup
from adtrain.augment.noise import Cutout, Noise

AUGMENTATIONS: dict[str, type[Augmentation]] = {
    change.kind(): change for change in (Crop, Flip, Affine, Noise, Cutout, Mixup)
}
"""Augmentations by their name in a config."""

__all__ = ["AUGMENTATIONS", "Affine", "Augmentation", "Batch", "Crop", "Cutout", "Flip", "Mixed", "Mixup", "Noise"]
