"""What staging gains: the training step run eagerly and as a Program, alternating, medians of both and their ratio.

python benchmarks/staging.py [CONFIG]... [--steps N]
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import click

from adtrain import config, training


@click.command()
@click.argument("configs", nargs=-1)
@click.option("--steps", default=50, show_default=True, help="Steps of each kind that count, after 5 that do not.")
def main(configs: tuple[str, ...], steps: int) -> None:
    """Time the step of each CONFIG (by default smoke, mlp-small and mlp)."""
    for name in configs or ("smoke", "mlp-small", "mlp"):
        cfg = config.load(name)
        work = [steps_of(training.prepare(cfg, eager)) for eager in (True, False)]
        times: list[list[float]] = [[], []]
        for _ in range(5 + steps):
            for take_step, found in zip(work, times, strict=True):
                start = perf_counter()
                take_step()
                found.append((perf_counter() - start) * 1e3)
        eager, staged = (median(found[5:]) for found in times)
        click.echo(f"{name:10}  eager {eager:7.2f} ms  staged {staged:7.2f} ms  ratio {eager / staged:.2f}")


def steps_of(experiment: training.Experiment) -> Callable[[], object]:
    return training.continuation(experiment, experiment.initial_state("cpu"))


if __name__ == "__main__":
    main()
