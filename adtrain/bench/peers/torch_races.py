"""A whole training in PyTorch: schedule, augmentation and batches are those of the config."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from adtrain import augment
from adtrain.bench.peers.adtrain_races import accuracy
from adtrain.bench.peers.layers import unsupported
from adtrain.bench.peers.races import Checked
from adtrain.bench.peers.steps import Job
from adtrain.bench.peers.torch_steps import WARM_UP_STEPS, Training
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.training.loop import batches_of


def run(job: Job, form: str) -> list[Checked]:
    """The epochs of one training. Raises Unsupported where PyTorch has no counterpart of something in the job."""
    import torch

    for change in job.experiment.augmentations:
        if not isinstance(change, augment.Crop):
            unsupported("PyTorch", f"the augmentation {change.kind()}")
    torch.manual_seed(job.experiment.config.training.seed)
    trained, experiment = Training(job, form, _cropped(job)), job.experiment
    rates = _rates(job)
    if form == "graph":
        trained.variable_rate()
    takes = {}
    for size in {len(batch) for batch in batches_of(experiment, 1)}:
        at = torch.arange(size, device=trained.device)
        takes[size] = trained.recorded(at) if form == "graph" else trained.step
        trained.warm_up(at, WARM_UP_STEPS)
    found, done = list[Checked](), 0
    for epoch in range(1, experiment.epochs + 1):
        batches = list(batches_of(experiment, epoch))[: experiment.total_steps - done]
        start = perf_counter()
        order = torch.tensor(np.concatenate(batches), device=trained.device).split([len(x) for x in batches])
        for i, at in enumerate(order, done):
            trained.set_rate(float(rates[i]))
            loss = takes[len(at)](at)
        float(loss)
        seconds = perf_counter() - start + (found[-1].seconds if found else 0.0)
        done += len(batches)
        found.append(Checked(seconds, _accuracy(job, trained)))
    return found


def _rates(job: Job) -> np.ndarray:
    """The learning rate of each step."""
    schedule, lr = job.experiment.schedule, job.experiment.optimizer.lr
    return np.array([float(schedule(array(np.int64(i))).numpy()) * lr for i in range(job.experiment.total_steps)])


def _cropped(job: Job) -> Any:
    """The config's augmentations, all of them crops, as a function of pixels (N, C, H, W)."""
    import torch

    def crop(x: Any, padding: int) -> Any:
        count, channels, height, width = x.shape
        padded = torch.nn.functional.pad(x, [padding] * 4)

        def indices(size: int) -> Any:
            corner = torch.randint(2 * padding + 1, (count, 1), device=x.device)
            return corner + torch.arange(size, device=x.device)

        rows, columns = indices(height)[:, None, :, None], indices(width)[:, None, None, :]
        images = torch.arange(count, device=x.device)[:, None, None, None]
        return padded[images, torch.arange(channels, device=x.device)[:, None, None], rows, columns]

    def changed(x: Any) -> Any:
        for change in job.experiment.augmentations:
            x = crop(x, change.padding)  # type: ignore[attr-defined]
        return x

    return changed


def _accuracy(job: Job, trained: Training) -> float:
    """The test accuracy of the weights, by adtrain."""
    state = job.experiment.initial_state("cpu")
    found = []
    for arrays in (state.params, state.statistics):
        structure = tree.flatten(arrays)[1]
        leaves = [array(trained.arrays[path].detach().cpu().numpy(), device=job.device) for path in tree.paths(arrays)]
        found.append(tree.unflatten(structure, leaves))
    return accuracy(job, *found)
