"""The training step of a config here and in PyTorch (eager), on the CPU: the ratio of medians of alternating rounds.

    python benchmarks/against_torch.py [CONFIG]... [--rounds N] [--threads N]

Each side runs in a process of its own, stopped while the other works, so that idle thread pools take no core. Both
start from the same weights and take the same batches; their losses over the first steps are compared before anything is
timed. A step is: gather the batch, normalise, forward, cross-entropy, backward, Adam or SGD.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np

from adtrain import config, data, nn, optim, training
from adtrain.core import tree
from adtrain.training.evaluation import on_device

COMPARED_STEPS = 5
LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order drift apart slowly

Step = Callable[[np.ndarray], float]
"""Takes a step on the training images at these indices, and returns the loss before it."""


def batches(experiment: training.Experiment) -> Iterator[np.ndarray]:
    size = experiment.config.data.batch_size
    for epoch in count(1):
        yield from (b for b in data.batches(len(experiment.train), size, 0, epoch) if len(b) == size)


def adtrain_step(experiment: training.Experiment) -> Step:
    state, seed = experiment.initial_state("cpu"), experiment.seed("cpu")

    def step(indices: np.ndarray) -> float:
        nonlocal state
        state, metrics = experiment.train_step(state, seed, *on_device(experiment.train, indices, "cpu"))
        return float(metrics.loss)

    return step


def torch_step(experiment: training.Experiment) -> Step:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    network = experiment.network
    model = torch.nn.Sequential(*(torch_layer(torch, layer, shape) for layer, shape in with_shapes(network)))
    start = experiment.initial_state("cpu").params
    weights = zip(tree.paths(start), tree.leaves(start), strict=True)
    model.load_state_dict({name: torch.tensor(np.array(x.numpy())) for name, x in weights})
    update = torch_optimizer(torch, experiment.optimizer, model.parameters())
    images, labels = torch.from_numpy(experiment.train.images), torch.from_numpy(experiment.train.labels)
    mean, std = (torch.tensor(x).reshape(1, -1, 1, 1) for x in (network.mean, network.std))

    def step(indices: np.ndarray) -> float:
        at = torch.from_numpy(indices)
        x = ((images[at].float() / 255 - mean) / std).reshape(len(at), *network.input_shape)
        update.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), labels[at])
        loss.backward()
        update.step()
        return loss.item()

    return step


def with_shapes(network: Any) -> Iterator[tuple[nn.Module, nn.Shape]]:
    shape = network.input_shape
    for layer in network.model.layers:
        yield layer, shape
        shape = layer.output_shape(shape)


def torch_layer(torch: Any, layer: nn.Module, shape: nn.Shape) -> Any:
    """The same layer in PyTorch, which wants to be told the size of its input."""
    match layer:
        case nn.Linear():
            return torch.nn.Linear(shape[-1], layer.out_features, layer.bias)
        case nn.Conv2d():
            options = (layer.stride, layer.padding, layer.dilation, layer.groups, layer.bias)
            return torch.nn.Conv2d(shape[0], layer.out_channels, layer.kernel_size, *options)
        case nn.MaxPool2d():
            return torch.nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding)
        case nn.Relu():
            return torch.nn.ReLU()
        case nn.Flatten():
            return torch.nn.Flatten()
    raise click.UsageError(f"{layer.kind()} has no counterpart in this benchmark")


def torch_optimizer(torch: Any, optimizer: optim.Optimizer, parameters: Any) -> Any:
    match optimizer:
        case optim.Adam():
            return torch.optim.Adam(parameters, optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
        case optim.SGD():
            return torch.optim.SGD(parameters, optimizer.lr, optimizer.momentum, 0, optimizer.weight_decay)
    raise click.UsageError(f"{type(optimizer).__name__} has no counterpart in this benchmark")


def work(side: str, name: str) -> None:
    """A side's process: for each line "N" on standard input take N steps, and print their losses and milliseconds."""
    experiment = training.prepare(config.load(name, ["schedule=constant"]))
    step = (torch_step if side == "torch" else adtrain_step)(experiment)
    indices = batches(experiment)
    for line in sys.stdin:
        losses, times = [], []
        for _ in range(int(line)):
            batch = next(indices)
            start = perf_counter()
            losses.append(step(batch))
            times.append((perf_counter() - start) * 1e3)
        print(json.dumps([losses, times]), flush=True)


class Side:
    """A side's process, stopped unless it has been asked for steps."""

    def __init__(self, side: str, name: str, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--side", side, name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("a side ended early; its error stands above")
        losses, times = json.loads(line)
        self.process.send_signal(signal.SIGSTOP)
        return losses, times


@click.command()
@click.argument("configs", nargs=-1)
@click.option("--rounds", default=7, show_default=True, help="Rounds of each side that count.")
@click.option("--steps", default=30, show_default=True, help="Steps a round.")
@click.option("--threads", default=os.cpu_count(), show_default=True, help="Threads of each side's matrix products.")
@click.option("--side", type=click.Choice(["torch", "adtrain"]), hidden=True)
def main(configs: tuple[str, ...], rounds: int, steps: int, threads: int, side: str | None) -> None:
    """Compare the step of each CONFIG (by default mlp, mlp-small, lenet5 and cnn)."""
    if side is not None:
        work(side, configs[0])
        return
    for name in configs or ("mlp", "mlp-small", "lenet5", "cnn"):
        sides = [Side(which, name, threads) for which in ("adtrain", "torch")]
        try:
            ours, theirs = (np.array(s.run(COMPARED_STEPS)[0]) for s in sides)
            if not np.allclose(ours, theirs, rtol=LOSS_TOLERANCE):
                raise click.ClickException(f"{name}: losses differ: {ours.tolist()} and {theirs.tolist()}")
            times = [[median(s.run(steps)[1]) for s in sides] for _ in range(rounds)]
        finally:
            for s in sides:
                s.process.kill()
        a, b = (median(column) for column in zip(*times, strict=True))
        low, ratio, high = np.percentile([torch / adtrain for adtrain, torch in times], [20, 50, 80])
        click.echo(
            f"{name:10} adtrain {a:7.2f} ms  PyTorch {b:7.2f} ms  "
            f"PyTorch / adtrain {ratio:.2f} (p20 {low:.2f}, p80 {high:.2f})"
        )


if __name__ == "__main__":
    main()
