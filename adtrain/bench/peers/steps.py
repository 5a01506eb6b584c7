"""The training step of an experiment as each side takes it.

All sides start from the same weights and go through the same batches. A step gathers its batch from the uint8 images in
the device's memory, normalises it, and does forward, loss, backward, clipping and update at a constant rate. Nothing
waits for the device but the reading of the last loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from adtrain import data, nn, training
from adtrain.bench.peers.catalogue import OURS
from adtrain.bench.peers.sides import SideSkips
from adtrain.core import tree

CHUNK = {"cpu": 5, "gpu": 20}
"""Steps of a call, by device."""

CHUNKS = 20
"""Calls after which the batches come again."""

COMPARED = 5
"""Steps whose losses are compared before anything is timed."""


class Runner(NamedTuple):
    """A side's training.

    Attributes:
        losses: takes the steps of a call and returns their losses, one each.
        run: takes the steps of so many calls and returns the loss of the last one, once it is done.
    """

    losses: Callable[[], Sequence[float]]
    run: Callable[[int], float]


@dataclass(frozen=True)
class Job:
    """What every side is given."""

    experiment: training.Experiment
    device: str

    @cached_property
    def orders(self) -> np.ndarray:
        """Indices of batches: int64 (CHUNKS, CHUNK, batch)."""
        size, chunk = self.experiment.full_batch, CHUNK[self.device]
        epochs = (data.batches(len(self.experiment.train), size, 0, epoch) for epoch in count(1))
        batches = (batch for epoch in epochs for batch in epoch if len(batch) == size)
        return np.stack(list(islice(batches, CHUNKS * chunk))).reshape(CHUNKS, chunk, size)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The parameters before the first step, by dotted path: "0.weight"."""
        return _by_path(self.experiment.initial_state("cpu").params)

    @cached_property
    def statistics(self) -> dict[str, np.ndarray]:
        """The running statistics before the first step, by dotted path: "1.running_mean"."""
        return _by_path(self.experiment.initial_state("cpu").statistics)

    @cached_property
    def normalization(self) -> Sequence[np.ndarray]:
        """What pixels (C, H, W) are multiplied with, and what is added then, in the network's dtype."""
        network = self.experiment.network
        std, mean = (np.array(x).reshape(-1, 1, 1) for x in (network.std, network.mean))
        return [x.astype(network.dtype) for x in (1 / (255 * std), -mean / std)]


def _by_path(arrays: Any) -> dict[str, np.ndarray]:
    leaves = zip(tree.paths(arrays), tree.leaves(arrays), strict=True)
    return {path: np.array(x.numpy()) for path, x in leaves}


def runner(name: str, job: Job) -> Runner:
    """The training of a side.

    Raises:
        SideSkips: the peer has no counterpart for something in it.
    """
    if name != OURS:
        _check_comparable(job.experiment.network.model)
    package, _, form = name.partition("-")
    match package:
        case "torch":
            from adtrain.bench.peers import torch_steps

            return torch_steps.runner(job, form)
        case "jax":
            from adtrain.bench.peers import jax_steps

            return jax_steps.runner(job, form)
        case "numpy":
            from adtrain.bench.peers import numpy_steps

            return numpy_steps.runner(job)
    from adtrain.bench.peers import ours

    return ours.runner(job)


def _check_comparable(model: nn.Module) -> None:
    for layer in leaves(model):
        if isinstance(layer, nn.Dropout) and layer.p:
            raise SideSkips("dropout draws other random numbers (compare with p=0)")


def leaves(layer: nn.Module) -> Iterator[nn.Module]:
    """The layers that are no containers."""
    match layer:
        case nn.Sequential(layers=inside) | nn.Concat(branches=inside) | nn.Add(branches=inside):
            for child in inside:
                yield from leaves(child)
        case nn.Residual(body=body, shortcut=shortcut):
            yield from leaves(body)
            if shortcut is not None:
                yield from leaves(shortcut)
        case _:
            yield layer
