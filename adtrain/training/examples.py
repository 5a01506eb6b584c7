"""A data set where the step can reach it: the images and labels of a split, on a device for a whole run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain.core.array import Array, array
from adtrain.core.backend import backend
from adtrain.data import Split


class Examples(NamedTuple):
    """`images` uint8 (N, C, H, W) and `labels` int64 (N,) on one device."""

    images: Array
    labels: Array

    def batches(self, indices: np.ndarray) -> tuple[Array, Array, Array]:
        """What a step takes: all images, all labels, and the `indices` of a batch or of a batch each row, int64."""
        return self.images, self.labels, array(indices, device=self.labels.device)


def on_device(split: Split, device: str) -> Examples:
    """The split's arrays on `device`. On the CPU they are the split's own memory, not to be written to any more."""
    return Examples(_array(split.images, device), _array(split.labels, device))


def _array(x: np.ndarray, device: str) -> Array:
    """`x` as it is where it is C-contiguous; `array` would copy it, because others might write to theirs."""
    elements = np.ascontiguousarray(x).view()
    elements.flags.writeable = False
    return Array(backend(device).from_numpy(elements), elements.shape, elements.dtype, device)
