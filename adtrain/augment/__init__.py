"""Data augmentation: random changes of a batch, made of operations, so that they are traced with the training step.

Typical use:

    batch = augment.Batch(images, labels, unit)
    for change in (augment.Crop(4), augment.Flip(), augment.Mixup(0.2)):
        batch = change(batch, rng)

Pixels from outside of an image are 0, black, unless a crop reflects. Random numbers depend only on `rng` (seed and
step) and on the augmentation's name, not on the other augmentations or their order. A resumed run draws the same
numbers as an uninterrupted one.
"""

from __future__ import annotations

from adtrain.augment.batch import Augmentation, Batch, Drawn, Mixed, Resampled
from adtrain.augment.geometry import (
    Affine,
    Crop,
    Flip,
    Motion,
    Move,
    RandomResizedCrop,
    VerticalFlip,
    affine_transform,
    leading_moves,
    moved,
)
from adtrain.augment.values import ColorJitter, Cutmix, Cutout, Mixing, Mixup, Noise, larger_shares

__all__ = [
    "AUGMENTATIONS", "Affine", "Augmentation", "Batch", "ColorJitter", "Crop", "Cutmix", "Cutout", "Drawn", "Flip",
    "Mixed", "Mixing", "Mixup", "Motion", "Move", "Noise", "RandomResizedCrop", "Resampled", "VerticalFlip",
    "affine_transform", "larger_shares", "leading_moves", "moved",
]  # fmt: skip

AUGMENTATIONS: dict[str, type[Augmentation]] = {
    change.kind(): change
    for change in (
        *(Crop, RandomResizedCrop, Flip, VerticalFlip, Affine),
        *(ColorJitter, Noise, Cutout),
        *(Mixup, Cutmix),
    )
}
"""Augmentations by their name in a config."""
