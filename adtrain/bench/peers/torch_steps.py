"""The training step in PyTorch: eager, with forward pass and loss compiled, or as one CUDA graph."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

from adtrain.bench.peers import torch_network
from adtrain.bench.peers.layers import Arrays, unsupported
from adtrain.bench.peers.steps import Job, Runner

WARM_UP_STEPS = 3
"""Before capture, as PyTorch's documentation of CUDA graphs asks: memory is allocated, algorithms are selected."""


def runner(job: Job, form: str) -> Runner:
    """The step as `form` says: "eager", "compile" or "graph".

    Raises:
        Unsupported: PyTorch has no counterpart of a layer or the precision.
    """
    import torch

    device = configure(job.experiment.config.training.precision, job.device)
    experiment, training = job.experiment, job.experiment.config.training
    network = experiment.network
    parameters = {path: torch.tensor(x, device=device, requires_grad=True) for path, x in job.weights.items()}
    statistics = {path: torch.tensor(x, device=device) for path, x in job.statistics.items()}
    update = torch_network.optimizer(experiment.optimizer, list(parameters.values()), form == "graph")
    images, labels = (torch.tensor(x, device=device) for x in (experiment.train.images, experiment.train.labels))
    scale, shift = (torch.tensor(x, device=device) for x in job.normalization)
    classes = network.model.output_shape(network.input_shape)[0]
    outputs = torch_network.model(network.model)
    loss_of = torch_network.loss(experiment.config, torch.eye(classes, device=device, dtype=scale.dtype))

    def forward(arrays: Arrays, at: Any) -> Any:
        pixels = images.index_select(0, at).to(scale.dtype) * scale + shift
        return loss_of(outputs(arrays, pixels.reshape(len(at), *network.input_shape)), labels.index_select(0, at))

    if form == "compile":
        forward = torch.compile(forward)

    def step(at: Any) -> Any:
        update.zero_grad(set_to_none=True)
        loss = forward({**parameters, **statistics}, at)
        loss.backward()
        if training.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters.values(), training.clip_value)
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), training.clip_norm)
        update.step()
        return loss.detach()

    orders = torch.tensor(job.orders, device=device)
    take_step = _recorded(step, orders[0, 0].clone(), {**parameters, **statistics}, update) if form == "graph" else step
    chunks = cycle(orders)

    def run(calls: int) -> float:
        for _ in range(calls):
            for at in next(chunks):
                loss = take_step(at)
        return float(loss)

    return Runner(lambda: [float(take_step(at)) for at in next(chunks)], run)


def configure(precision: str, device: str) -> Any:
    """Set threads and the precision of matrix products and convolutions in this process; returns the torch.device."""
    import torch

    if precision == "bfloat16":
        unsupported("PyTorch", "float32 arrays whose products are in bfloat16")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    return torch.device("cpu" if device == "cpu" else "cuda")


def _recorded(step: Callable[[Any], Any], at: Any, arrays: Arrays, update: Any) -> Callable[[Any], Any]:
    """The step as a CUDA graph that reads its indices from `at`. Arrays and optimizer are reset after the warm-up."""
    import torch

    start = {path: x.detach().clone() for path, x in arrays.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            step(at)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    update.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step(at)
    with torch.no_grad():
        for path, first in start.items():
            arrays[path].copy_(first)
    for averages in update.state.values():
        for x in averages.values():
            x.zero_()

    def take_step(indices: Any) -> Any:
        at.copy_(indices)
        graph.replay()
        return loss

    return take_step
