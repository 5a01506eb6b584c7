"""What all ranks of a job must have in common."""

from __future__ import annotations

from adtrain.training.experiment import Experiment
from adtrain.version import __version__


def identity(experiment: Experiment, device: str) -> dict[str, str]:
    """Texts that are equal on all ranks, by what they describe: version, device, config, and digests of the data."""
    splits = {"training set": experiment.train, "test set": experiment.test}
    return {
        "version of adtrain": __version__,
        "kind of device": device,
        "config": experiment.config_text,
        **{
            name: "\n".join([f"{len(split)} examples", *(f"{x} sha256 {y}" for x, y in split.digests.items())])
            for name, split in splits.items()
        },
    }
