"""A step of a neural field on an image: the loss and its gradient, and the launches with their times.

    python benchmarks/fields.py [--device cpu|gpu] [--side N] [--batch N] [--precision full|tf32] [--rounds N]

A hash grid of 16 levels with 2 features and 2^15 rows (Müller et al., 2022), then a network of two hidden layers of 64
units. A time is the median of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import click
import numpy as np

import adtrain as ad
from adtrain import nn, ops
from adtrain.bench.profile import OpTimer
from adtrain.core.staging import Staged, stage
from adtrain.core.trace import hook
from adtrain.passes import ALL

SAMPLE_SECONDS = 0.1


def loss_and_gradient(device: str, side: int, batch: int, precision: str) -> Callable[[], Any]:
    """The mean squared error of a batch, and its gradient by the parameters."""
    layers = [nn.HashGrid(levels=16, log2_table_size=15, finest_resolution=side)]
    model = nn.Sequential(*layers, nn.Linear(64), nn.ReLU(), nn.Linear(64), nn.ReLU(), nn.Linear(3))
    params, _ = model.init(2)
    rng = np.random.default_rng(0)
    points, colours = rng.uniform(-1, 1, (batch, 2)), rng.uniform(0, 1, (batch, 3))

    def loss(params: Any, points: Any, colours: Any) -> Any:
        with ops.matmul_precision(precision):
            return ops.mse_loss(model(params, points), colours)

    step: Staged = stage(ad.value_and_grad(loss), ALL)
    arrays = ad.tree.map(lambda x: ad.array(np.asarray(x, np.float32), device=device), (params, points, colours))
    return lambda: step(*arrays)


def seconds(step: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        found = step()
    found[0].numpy()
    return (time.perf_counter() - start) / calls


@click.command()
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--side", type=int, default=2048, show_default=True)
@click.option("--batch", type=int, default=1 << 18, show_default=True)
@click.option("--precision", type=click.Choice(["full", "tf32"]), default="full", show_default=True)
@click.option("--rounds", type=int, default=9, show_default=True)
def command(device: str, side: int, batch: int, precision: str, rounds: int) -> None:
    """Measure and print a table."""
    step = loss_and_gradient(device, side, batch, precision)
    seconds(step, 2)
    calls = max(1, round(SAMPLE_SECONDS / seconds(step, 3)))
    times = [seconds(step, calls) for _ in range(rounds)]
    click.echo(f"field, {device}, {precision}: {median(times) * 1e3:.3f} ms, from {min(times) * 1e3:.3f}")
    timer, runs = OpTimer(), 5
    with hook(timer):
        for _ in range(runs):
            step()
    for key, elapsed in sorted(timer.seconds.items(), key=lambda item: -item[1]):
        click.echo(f"  {elapsed / runs * 1e3:8.3f} ms  {key[2]:9} {key[1]:32} {key[0]}")


if __name__ == "__main__":
    command()
