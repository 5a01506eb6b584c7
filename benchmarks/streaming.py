"""The cost of streaming: times to gather batches, and to train on streamed and on resident data.

python benchmarks/streaming.py [CONFIG]... [--device cpu|gpu]
"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter
from unittest import mock

import click
import numpy as np

from adtrain import config, training
from adtrain.bench.sampling import in_turns
from adtrain.training import trainer
from adtrain.training.examples import Resident, Streamed
from adtrain.training.experiment import LOG_ROWS

ROUNDS = 3


@click.command()
@click.argument("configs", nargs=-1)
@click.option("--device", default="cpu", show_default=True)
def main(configs: tuple[str, ...], device: str) -> None:
    """Train an epoch of each CONFIG (by default mlp-small, mlp, cnn), alternately on resident and on streamed data."""
    for name in configs or ("mlp-small", "mlp", "cnn"):
        cfg = config.load(name, ["training.epochs=1"])
        experiment = training.prepare(cfg)
        kinds: tuple[type, ...] = (Resident, Streamed)
        found = in_turns({kind: partial(step_ms, experiment, device, kind) for kind in kinds}, ROUNDS)
        resident, streamed = (median(times) for times in found.values())
        loading = loading_ms(experiment)
        times = f"loader {loading:6.3f}  step {resident:6.3f}  streamed {streamed:6.3f} ms"
        click.echo(f"{name:10}  {times}  streamed / resident {streamed / resident:.2f}")


def step_ms(experiment: training.Experiment, device: str, kind: type) -> float:
    """Milliseconds of a step in a training whose data are of this kind."""
    with mock.patch.object(trainer, "on_device", kind):
        result = training.run(experiment, device)
    return result.train_seconds / result.steps * 1e3


def loading_ms(experiment: training.Experiment) -> float:
    """Milliseconds to gather a batch, as part of a chunk."""
    stream, rng = Streamed(experiment.train, "cpu"), np.random.default_rng(0)
    order = rng.integers(0, len(stream), (LOG_ROWS, experiment.full_batch))
    seconds = []
    for _ in range(5):
        started = perf_counter()
        stream.batches(order)
        seconds.append(perf_counter() - started)
    return median(seconds) * 1e3 / LOG_ROWS


if __name__ == "__main__":
    main()
