"""The training step of several ranks in PyTorch: DistributedDataParallel, or a CUDA graph with an all-reduce in it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from adtrain.bench.peers import torch_network
from adtrain.bench.peers.jobs import Job
from adtrain.bench.peers.torch_system import Training
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError


class Ranks(NamedTuple):
    """This process in its process group.

    Attributes:
        barrier: returns when all ranks have called it.
        broadcast: returns the argument of rank 0 on all ranks.
    """

    rank: int
    size: int
    device_name: str
    barrier: Callable[[], object]
    broadcast: Callable[[int], int]


@contextmanager
def process_group(device: str, timeout: float) -> Iterator[Ranks]:
    """Within the block, this process is in the process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    A CUDA graph with an exchange must be gone before the block ends: NCCL waits until no graph uses it.

    Args:
        timeout: of an exchange, in seconds.
    """
    import torch
    from torch import distributed

    distributed.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=timeout))

    def broadcast(number: int) -> int:
        tensor = torch.tensor([number], device="cpu" if device == "cpu" else "cuda")
        distributed.broadcast(tensor, 0)
        return int(tensor)

    try:
        name = backend("cpu").device_name() if device == "cpu" else torch.cuda.get_device_name()
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), name, lambda: broadcast(0), broadcast)
    finally:
        gc.collect()
        distributed.destroy_process_group()


def runner(job: Job, form: str, ranks: Ranks) -> Callable[[int], float]:
    """A function that takes steps, waits for the device, and returns the loss of this rank's part of the last batch.

    `form` is "ddp" or "graph". The gradients are means over the ranks, so the step is one on the whole batch.

    Raises:
        AdtrainError: the batch cannot be divided into equal parts.
        Unsupported: PyTorch has no counterpart of a layer.
    """
    import torch

    size = job.experiment.full_batch
    if size % ranks.size:
        raise AdtrainError(
            f"torch-{form}: found a batch of {size} and {ranks.size} ranks, expected a multiple of the number of ranks"
        )
    own_orders = job.orders.reshape(-1, ranks.size, size // ranks.size)[:, ranks.rank]
    training = with_ddp(job) if form == "ddp" else MeanGradients(job, "graph", ranks.size)
    orders = torch.tensor(np.ascontiguousarray(own_orders), device=training.device)
    take_step = training.repeatable(orders[0])
    batches = cycle(orders)

    def run(steps: int) -> float:
        for _ in range(steps):
            loss = take_step(next(batches))
        return float(loss)

    return run


def with_ddp(job: Job) -> Training:
    """A training whose gradients DistributedDataParallel exchanges while they are computed."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    training = Training(job, "eager")
    network: Any = torch.nn.Module()
    for i, (path, x) in enumerate(training.parameters.items()):
        training.parameters[path] = training.arrays[path] = torch.nn.Parameter(x.detach())
        network.register_parameter(str(i), training.parameters[path])
    training.update = torch_network.optimizer(job.experiment.optimizer, training.parameters, False)
    forward = training.forward
    network.forward = lambda at: forward(training.arrays, at)
    model = DistributedDataParallel(network)
    training.forward = lambda arrays, at: model(at)
    return training


class MeanGradients(Training):
    """A training whose gradients are views of one flat tensor. An all-reduce averages it after the backward pass."""

    def __init__(self, job: Job, form: str, size: int) -> None:
        import torch

        super().__init__(job, form)
        self.size = size
        parameters = list(self.parameters.values())
        lengths = [x.numel() for x in parameters]
        self.gradients = torch.zeros(sum(lengths), dtype=parameters[0].dtype, device=self.device)
        for x, part in zip(parameters, self.gradients.split(lengths), strict=True):
            x.grad = part.view_as(x)

    def clear(self) -> None:
        self.gradients.zero_()

    def exchange(self) -> None:
        from torch import distributed

        if self.size > 1:
            distributed.all_reduce(self.gradients)
            self.gradients.div_(self.size)
