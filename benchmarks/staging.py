"""What staging and fusion gain: the training step eager, as a Program and fused, in turns, medians and ratios.

python benchmarks/staging.py [CONFIG]... [--steps N]

The first steps of each turn do not count: NumPy's BLAS has threads of its own, which wait for more work before they
sleep, and meanwhile take the cores from those of a Program.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import click

from adtrain import config, training

ROUNDS, WARMUP = 4, 4


@click.command()
@click.argument("configs", nargs=-1)
@click.option("--steps", default=10, show_default=True, help="Steps of each kind a round that count.")
def main(configs: tuple[str, ...], steps: int) -> None:
    """Time the step of each CONFIG (by default smoke, mlp-small, mlp, lenet5 and cnn)."""
    for name in configs or ("smoke", "mlp-small", "mlp", "lenet5", "cnn"):
        cfg = config.load(name)
        work = [steps_of(training.prepare(cfg, mode)) for mode in training.Mode]
        times: list[list[float]] = [[] for _ in work]
        for _ in range(ROUNDS):
            for take_step, found in zip(work, times, strict=True):
                found += [seconds_of(take_step) for _ in range(WARMUP + steps)][WARMUP:]
        eager, staged, fused = (median(found) * 1e3 for found in times)
        ratios = f"eager / fused {eager / fused:.2f}  staged / fused {staged / fused:.2f}"
        click.echo(f"{name:10}  eager {eager:7.2f}  staged {staged:7.2f}  fused {fused:7.2f} ms  {ratios}")


def seconds_of(take_step: Callable[[int], object]) -> float:
    start = perf_counter()
    take_step(1)
    return perf_counter() - start


def steps_of(experiment: training.Experiment) -> Callable[[int], object]:
    return training.continuation(experiment, experiment.initial_state("cpu"))


if __name__ == "__main__":
    main()
