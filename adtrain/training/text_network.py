"""Checks of a network that predicts the next class at each position of a text."""

from __future__ import annotations

import numpy as np

from adtrain import nn
from adtrain.core.array import array
from adtrain.training.experiment import Experiment

NEGLIGIBLE = 1e-6
"""A change below this fraction of the largest output is rounding."""


def sees_later(experiment: Experiment) -> tuple[int, int] | None:
    """A position and a later one that the initial network's output at it depends on; None if there is none.

    Two sequences that differ in the last position only are compared. A dependence through weights of 0 is not found.
    """
    length = experiment.image_shape[-1]
    inputs = np.zeros((2, 1, 1, length), np.float32)
    inputs[1, ..., -1] = len(experiment.data.classes) - 1
    state = experiment.random_initial_state("cpu")
    outputs, _ = experiment.network.outputs(state.params, state.statistics, array(inputs), nn.Mode(training=False))
    first, second = outputs.numpy()
    changed = np.abs(first - second).max(axis=-1) > NEGLIGIBLE * np.abs(first).max()
    return (int(changed.argmax()), length - 1) if changed[:-1].any() else None
