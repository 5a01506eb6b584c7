"""What all ranks of a job must have in common."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from adtrain.data import Split
from adtrain.training.experiment import Experiment
from adtrain.version import __version__

SAMPLED = 1000
"""Examples of each split whose elements are compared."""


def identity(experiment: Experiment, device: str) -> dict[str, str]:
    """Texts that are equal on all ranks, by what they describe: version, device, config, and a digest of the data."""
    return {
        "version of adtrain": __version__,
        "kind of device": device,
        "config": experiment.config_text,
        "training set": _digest(experiment.train),
        "test set": _digest(experiment.test),
    }


def _digest(split: Split) -> str:
    """The number of examples, and a digest of the labels and of up to SAMPLED images."""
    found = sha256(np.ascontiguousarray(split.labels).tobytes())
    for i in range(0, len(split), max(1, len(split) // SAMPLED)):
        found.update(np.ascontiguousarray(split.images[i : i + 1]).tobytes())
    return f"{len(split)} examples, sha256 {found.hexdigest()}"
