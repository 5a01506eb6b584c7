"""The training step of a config here and in PyTorch (eager), on the CPU: the ratio of medians of alternating rounds.

    python benchmarks/against_torch.py [CONFIG]... [--set K=V]... [--rounds N] [--threads N]

Each side runs in a process of its own, stopped while the other works, so that idle thread pools take no core. Both
start from the same weights and take the same batches; their losses over the first steps are compared before anything is
timed. A step is: gather the batch from the uint8 data set in memory, normalise, forward, cross-entropy, backward, Adam
or SGD. Peak memory is the largest resident size of each side's process, libraries and data set included.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from statistics import median
from time import perf_counter
from typing import NamedTuple

import click
import numpy as np
from sides import Side, serve

from adtrain import config, data, training

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
    from torch_network import torch_model, torch_optimizer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    network, model = experiment.network, torch_model(experiment)
    update = torch_optimizer(experiment.optimizer, model.parameters())
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


class Steps(NamedTuple):
    """Some steps of a side: each one's loss and milliseconds, and the process's peak memory by then, in MiB."""

    losses: list[float]
    times: list[float]
    peak: float


def work(side: str, name: str, overrides: Sequence[str]) -> None:
    """A side's process: asked for N it takes N steps, and answers with the `Steps`."""
    experiment = training.prepare(config.load(name, [*overrides, "schedule=constant"]))
    step = (torch_step if side == "torch" else adtrain_step)(experiment)
    indices = batches(experiment)

    def taken(count: str) -> Steps:
        losses, times = [], []
        for _ in range(int(count)):
            batch = next(indices)
            start = perf_counter()
            losses.append(step(batch))
            times.append((perf_counter() - start) * 1e3)
        return Steps(losses, times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / PEAK_UNIT)

    serve(taken)


def started(side: str, name: str, overrides: Sequence[str], threads: int) -> Side:
    command = [__file__, "--side", side, name, *(f"--set={override}" for override in overrides)]
    return Side(command, {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)})


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
        sides = [started(which, name, [*changes, *overrides], threads) for which in ("adtrain", "torch")]
        try:
            click.echo(f"{label:15}  {compare(sides, rounds, steps)}")
        finally:
            for s in sides:
                s.close()


def compare(sides: Sequence[Side], rounds: int, steps: int) -> str:
    """A line of times, their ratio, and peak memory, for sides whose first losses agree."""
    ours, theirs = (np.array(Steps(*s.ask(COMPARED_STEPS)).losses) for s in sides)
    if not np.allclose(ours, theirs, rtol=LOSS_TOLERANCE):
        raise click.ClickException(f"losses differ: {ours.tolist()} and {theirs.tolist()}")
    found = [[Steps(*s.ask(steps)) for s in sides] for _ in range(rounds)]
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
