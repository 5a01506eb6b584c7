"""The training step of a config here and in PyTorch (eager), on the CPU: the ratio of medians of alternating rounds.

    python benchmarks/against_torch.py [CONFIG]... [--set K=V]... [--rounds N] [--threads N]

Each side runs in a process of its own, stopped while the other works, so that idle thread pools take no core. Both
start from the same weights and take the same batches; their losses over the first steps are compared before anything is
timed. A step is: gather the batch from the uint8 data set in memory, normalise, forward, cross-entropy, backward, Adam
or SGD. Peak memory is the largest resident size of each side's process, libraries and data set included.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import click
import numpy as np

from adtrain import config, data, nn, optim, training
from adtrain.core import tree

COMPARED_STEPS = 5
LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order drift apart slowly

# What is measured where no config is named: a config and what overrides it.
DEFAULTS: dict[str, tuple[str, ...]] = {
    "mlp": ("mlp",),
    "mlp, SGD": ("mlp", "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"),
    "mlp-small": ("mlp-small",),
    "mlp-small, Adam": ("mlp-small", "optimizer={adam: {lr: 0.001}}"),
    "lenet5": ("lenet5",),
    "cnn": ("cnn",),
}
PEAK_UNIT = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss in MiB; it counts bytes on macOS, else KiB

Step = Callable[[np.ndarray], float]
"""Takes a step on the training images at these indices, and returns the loss before it."""


def batches(experiment: training.Experiment) -> Iterator[np.ndarray]:
    size = experiment.full_batch
    for epoch in count(1):
        yield from (b for b in data.batches(len(experiment.train), size, 0, epoch) if len(b) == size)


def adtrain_step(experiment: training.Experiment) -> Step:
    state, seed = experiment.initial_state("cpu"), experiment.seed("cpu")
    examples = training.on_device(experiment.train, "cpu")

    def step(indices: np.ndarray) -> float:
        nonlocal state
        state, metrics = experiment.train_step(state, seed, *examples.batches(indices))
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


class Steps(NamedTuple):
    """Some steps of a side: each one's loss and milliseconds, and the process's peak memory by then, in MiB."""

    losses: list[float]
    times: list[float]
    peak: float


def work(side: str, name: str, overrides: Sequence[str]) -> None:
    """A side's process: for each line "N" on standard input take N steps, and print the `Steps`."""
    experiment = training.prepare(config.load(name, [*overrides, "schedule=constant"]))
    step = (torch_step if side == "torch" else adtrain_step)(experiment)
    indices = batches(experiment)
    for line in sys.stdin:
        losses, times = [], []
        for _ in range(int(line)):
            batch = next(indices)
            start = perf_counter()
            losses.append(step(batch))
            times.append((perf_counter() - start) * 1e3)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / PEAK_UNIT
        print(json.dumps(Steps(losses, times, peak)), flush=True)


class Side:
    """A side's process, stopped unless it has been asked for steps."""

    def __init__(self, side: str, name: str, overrides: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--side", side, name, *(f"--set={override}" for override in overrides)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, steps: int) -> Steps:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("a side ended early; its error stands above")
        self.process.send_signal(signal.SIGSTOP)
        return Steps(*json.loads(line))


@click.command()
@click.argument("configs", nargs=-1)
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override a value of each CONFIG.")
@click.option("--rounds", default=7, show_default=True, help="Rounds of each side that count.")
@click.option("--steps", default=30, show_default=True, help="Steps a round.")
@click.option("--threads", default=os.cpu_count(), show_default=True, help="Threads of each side's matrix products.")
@click.option("--side", type=click.Choice(["torch", "adtrain"]), hidden=True)
def main(
    configs: tuple[str, ...], overrides: tuple[str, ...], rounds: int, steps: int, threads: int, side: str | None
) -> None:
    """Compare the step of each CONFIG (by default mlp, mlp-small, lenet5 and cnn; the first two with Adam and SGD)."""
    if side is not None:
        work(side, configs[0], overrides)
        return
    for label, (name, *changes) in ({name: (name,) for name in configs} or DEFAULTS).items():
        sides = [Side(which, name, [*changes, *overrides], threads) for which in ("adtrain", "torch")]
        try:
            click.echo(f"{label:15}  {compare(sides, rounds, steps)}")
        finally:
            for s in sides:
                s.process.kill()


def compare(sides: Sequence[Side], rounds: int, steps: int) -> str:
    """A line of times, their ratio, and peak memory, for sides whose first losses agree."""
    ours, theirs = (np.array(s.run(COMPARED_STEPS).losses) for s in sides)
    if not np.allclose(ours, theirs, rtol=LOSS_TOLERANCE):
        raise click.ClickException(f"losses differ: {ours.tolist()} and {theirs.tolist()}")
    found = [[s.run(steps) for s in sides] for _ in range(rounds)]
    times = [[median(taken.times) for taken in both] for both in found]
    a, b = (median(column) for column in zip(*times, strict=True))
    low, ratio, high = np.percentile([torch / adtrain for adtrain, torch in times], [20, 50, 80])
    peak_a, peak_b = (taken.peak for taken in found[-1])
    return (
        f"adtrain {a:7.2f} ms {peak_a:4.0f} MiB  PyTorch {b:7.2f} ms {peak_b:4.0f} MiB  "
        f"PyTorch / adtrain {ratio:.2f} (p20 {low:.2f}, p80 {high:.2f})"
    )


if __name__ == "__main__":
    main()
