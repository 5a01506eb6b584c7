"""The training step in PyTorch: eager, with forward pass and loss compiled, or as one CUDA graph.

In bfloat16 the forward pass and the loss run under `torch.autocast`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from adtrain.bench.peers import torch_network
from adtrain.bench.peers.layers import Arrays
from adtrain.bench.peers.steps import Job, Runner

WARM_UP_STEPS = 3
"""Before capture, as PyTorch's documentation of CUDA graphs asks: memory is allocated, algorithms are selected."""


class Training:
    """A network in training.

    Args:
        form: "eager", "compile" or "graph".
        changed: is applied to the pixels of a batch, (N, C, H, W), before they are normalised.

    Raises:
        Unsupported: PyTorch has no counterpart of a layer.
    """

    def __init__(self, job: Job, form: str, changed: Callable[[Any], Any] = lambda pixels: pixels) -> None:
        import torch

        precision = job.experiment.config.training.precision
        self.device = device = configure(precision, job.device)
        experiment = job.experiment
        network, self.clipping = experiment.network, experiment.config.training
        self.parameters = {path: torch.tensor(x, device=device, requires_grad=True) for path, x in job.weights.items()}
        statistics = {path: torch.tensor(x, device=device) for path, x in job.statistics.items()}
        self.arrays = {**self.parameters, **statistics}
        self.start = {path: x.detach().clone() for path, x in self.arrays.items()}
        self.update = torch_network.optimizer(experiment.optimizer, list(self.parameters.values()), form == "graph")
        examples = np.asarray(experiment.train.images), experiment.train.labels.astype(np.int64)
        images, labels = (torch.tensor(x, device=device) for x in examples)
        scale, shift = (torch.tensor(x, device=device) for x in job.normalization)
        classes = network.model.output_shape(network.input_shape)[0]
        outputs = torch_network.model(network.model)
        loss_of = torch_network.loss(experiment.config, torch.eye(classes, device=device, dtype=scale.dtype))

        def forward(arrays: Arrays, at: Any) -> Any:
            pixels = changed(images.index_select(0, at).to(scale.dtype)) * scale + shift
            inputs = pixels.reshape(len(at), *network.input_shape)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                return loss_of(outputs(arrays, inputs), labels.index_select(0, at))

        self.forward = torch.compile(forward) if form == "compile" else forward

    def step(self, at: Any) -> Any:
        """Take a step on the batch at these indices, and return its loss."""
        import torch

        self.clear()
        loss = self.forward(self.arrays, at)
        loss.backward()
        self.exchange()
        if self.clipping.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters.values(), self.clipping.clip_value)
        if self.clipping.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clipping.clip_norm)
        self.update.step()
        return loss.detach()

    def clear(self) -> None:
        """Remove the gradients of the last step."""
        self.update.zero_grad(set_to_none=True)

    def exchange(self) -> None:
        """Replace the gradients by their mean over all ranks; `torch_ranks` defines it."""

    def variable_rate(self) -> None:
        """Keep the learning rate in a tensor, so that `set_rate` changes it for recorded steps too."""
        import torch

        for group in self.update.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=self.device)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.update.param_groups:
            if isinstance(group["lr"], float):
                group["lr"] = rate
            else:
                group["lr"].fill_(rate)

    def warm_up(self, at: Any, steps: int) -> None:
        """Take steps, and return to the start."""
        import torch

        for _ in range(steps):
            self.step(at)
        with torch.no_grad():
            for path, first in self.start.items():
                self.arrays[path].copy_(first)
        for averages in self.update.state.values():
            for x in averages.values():
                x.zero_()

    def recorded(self, at: Any) -> Callable[[Any], Any]:
        """The step as a CUDA graph that reads its indices from `at`. Returns to the start after its warm-up."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.warm_up(at, WARM_UP_STEPS)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.clear()
        # Other threads, such as that of NCCL in torch.distributed, may call CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self.step(at)

        def take_step(indices: Any) -> Any:
            at.copy_(indices)
            graph.replay()
            return loss

        return take_step


def runner(job: Job, form: str) -> Runner:
    """The step as `form` says: "eager", "compile" or "graph".

    Raises:
        Unsupported: PyTorch has no counterpart of a layer.
    """
    import torch

    training = Training(job, form)
    orders = torch.tensor(job.orders, device=training.device)
    take_step = training.recorded(orders[0, 0].clone()) if form == "graph" else training.step
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

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    return torch.device("cpu" if device == "cpu" else "cuda")
