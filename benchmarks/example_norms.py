"""Norms of the gradients of examples (`training.metrics: [per_example_norm]`) and the training step, in turns.

    python benchmarks/example_norms.py [CONFIG ...] [--device cpu|gpu] [--examples N] [--rounds N] [--table]

Both take the same examples. A time is the median of the rounds. `--table` lists the equations of both Programs that
take longest. Standard error says what is compiled and measured. A config that fails is reported, the others are
measured, and the exit code is 1.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import click
import numpy as np

from adtrain import config
from adtrain.bench.profile import OpTimer
from adtrain.bench.sampling import in_turns
from adtrain.core.array import array
from adtrain.core.devices import find_device
from adtrain.core.trace import hook
from adtrain.training import prepare

CONFIGS = ("mlp", "lenet5", "cnn", "resnet", "vit", "lstm", "gpt")
SAMPLE_SECONDS = 0.2
TABLE_ROWS = 14


def ways(name: str, examples: int, device: str) -> dict[str, Callable[[], Any]]:
    """A training step and the norms, as functions without arguments."""
    overrides = [f"data.batch_size={examples}"]
    if name == "gpt":
        name, overrides = "char-gpt", [*overrides, f"data.path={__file__}", "data.length=128"]
    experiment = prepare(config.load(name, overrides))
    state = experiment.initial_state(device)
    seed = experiment.seed(device)
    train = experiment.train
    images, labels = (array(np.asarray(x[:examples]), device=device) for x in (train.images, train.labels))
    order = array(np.arange(len(images)), device=device)
    curvature = experiment.network.curvature
    params, statistics = experiment.initial_state(device)[:2]
    held = [state]

    def step() -> Any:
        held[0], metrics = experiment.train_step(held[0], seed, images, labels, order)
        return metrics.loss

    def norms() -> Any:
        return curvature.norms_of_chunk(params, statistics, images, labels)

    return {"step": step, "norms": norms}


def seconds(way: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        found = way()
    found.numpy()
    return (time.perf_counter() - start) / calls


def table(way: Callable[[], Any]) -> None:
    timer = OpTimer()
    with hook(timer):
        for _ in range(5):
            way()
    for key, elapsed in sorted(timer.seconds.items(), key=lambda item: -item[1])[:TABLE_ROWS]:
        click.echo(f"    {elapsed / 5 * 1e3:8.3f} ms  {key[2]:9} {key[1]:28} {key[0]}")


def measure(name: str, device: str, examples: int, rounds: int, with_table: bool) -> None:
    """Print the row of a config."""
    found = ways(name, examples, device)
    calls = {}
    for way, run in found.items():
        click.echo(f"{name}: compiling the {way} on the {device}", err=True)
        seconds(run, 2)
        calls[way] = max(1, round(SAMPLE_SECONDS / seconds(run, 2)))
    click.echo(f"{name}: measuring {rounds} rounds", err=True)
    times = in_turns({way: partial(seconds, run, calls[way]) for way, run in found.items()}, rounds)
    step, norms = (median(times[way]) * 1e3 for way in found)
    click.echo(f"{name:10} step {step:9.3f} ms   norms {norms:9.3f} ms   ratio {norms / step:.2f}")
    if with_table:
        for way, run in found.items():
            click.echo(f"  {way}")
            table(run)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--examples", type=int, default=512, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--table", "with_table", is_flag=True)
def command(names: Sequence[str], device: str, examples: int, rounds: int, with_table: bool) -> None:
    """Measure and print a table."""
    find_device(device)  # a missing device is one error, not one of each config
    failed = []
    for name in names or CONFIGS:
        try:
            measure(name, device, examples, rounds, with_table)
        except Exception:
            click.echo(f"{name} failed:\n{traceback.format_exc()}", err=True)
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    command()
