"""Augmentation: random changes of a batch, made of operations, so that they are part of the training step.

Typical use::

    batch = augment.Batch(images, labels, unit)
    for change in (augment.Crop(4), augment.Flip(), augment.Mixup(0.2)):
        batch = change(batch, rng)

Random numbers are a function of `rng` (seed and step) and of the augmentation's name: neither its place in the list nor
what else is in it changes them, and a resumed run draws what the whole run would have drawn.
"""

from __future__ import annotations

from adtrain.augment.augmentation import Augmentation, Batch, Mixed
from adtrain.augment.geometry import Affine, Crop, Flip
from adtrain.augment.mixup import Mixup
from adtrain.augment.noise import Cutout, Noise

AUGMENTATIONS: dict[str, type[Augmentation]] = {
    change.kind(): change for change in (Crop, Flip, Affine, Noise, Cutout, Mixup)
}
"""Every augmentation by its name in a config."""

__all__ = ["AUGMENTATIONS", "Affine", "Augmentation", "Batch", "Crop", "Cutout", "Flip", "Mixed", "Mixup", "Noise"]
