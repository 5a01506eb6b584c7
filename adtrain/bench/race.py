"""A race: whole trainings of a config in several systems, and the time until each reaches a test accuracy.

All systems start from the same weights and take the same batches at the same learning rates. The clock runs while they
train: from the upload of the order of an epoch's batches until the device has finished its last step. Compilation,
warm-up and evaluation are not counted. After each epoch adtrain computes the test accuracy of the system's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import pi, sqrt, tan
from statistics import mean, median, stdev

import numpy as np

from adtrain import config, training
from adtrain.bench.machine import Progress, observed_load, thread_count
from adtrain.bench.peers import comparison
from adtrain.bench.peers.comparison import conditions
from adtrain.bench.peers.jobs import Checked
from adtrain.bench.peers.systems import ADTRAIN, Choice, WorkerProcess, started
from adtrain.bench.result import NamedTime, TimedResult, of_samples
from adtrain.bench.sampling import in_turns
from adtrain.bench.view import ERROR, FACTOR, Column, Note, Part, Section, Table, View, absent
from adtrain.table import TEXT, CellFormat

STEP_ONLY = ("schedule=constant", "data.augment=null")
"""Overrides for the comparison of the first losses, in which schedule and random numbers have no part."""


@dataclass(frozen=True)
class Spread:
    """The distribution of numbers. `margin` is half of the 95% confidence interval of the mean; None of one number."""

    median: float
    min: float
    max: float
    mean: float
    deviation: float
    margin: float | None = None


@dataclass(frozen=True)
class Run:
    """A training from a seed. `seconds` until the target is None where it was not reached."""

    seed: int
    epochs: list[Checked]
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class SystemRuns:
    """The trainings of a system.

    Attributes:
        reached: the number of trainings that reached the target.
        seconds: until the target, of those that reached it.
        train_seconds: of whole trainings.
        accuracy: at the end.
    """

    reached: int
    seconds: Spread | None
    train_seconds: Spread
    accuracy: Spread
    runs: list[Run]


@dataclass(frozen=True, kw_only=True)
class Race(TimedResult):
    """The result of `adtrain bench race`.

    Attributes:
        off: relative errors of the first losses, by system.
        different: systems with other first losses than adtrain's; they did not race.
    """

    kind = "race"
    config: str
    overrides: list[str]
    target: float
    systems: dict[str, SystemRuns]
    off: dict[str, float]
    different: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]

    def times(self) -> Iterator[NamedTime]:
        what = ", ".join([self.config, *self.overrides])
        for name, system in self.systems.items():
            reached = [run.seconds * 1e3 for run in system.runs if run.seconds is not None]
            for goal, ms in (
                (f"until {self.target:.2%}", reached),
                ("whole training", [run.epochs[-1].seconds * 1e3 for run in system.runs]),
            ):
                if ms:
                    yield of_samples(f"{what}: {name}, {goal}", ms)

    def view(self) -> View:
        what = ", ".join([self.config, *self.overrides])
        about = (
            f"{what}: seconds of training until a test accuracy of {self.target:.2%}, checked after each epoch; "
            "compilation and evaluation are not counted"
        )
        notes = absent(self.skipped, self.failed)
        by_seed: list[Sequence[Run]] = list(zip(*(each.runs for each in self.systems.values()), strict=False))
        notes += [f"{name}: other first losses than adtrain's, so it did not race" for name in self.different]
        parts: list[Part] = [
            Note(about),
            Note("accuracy: mean at the end; ±: half of its 95% confidence interval (Student's t)"),
            Note("ratio: a system's median time over adtrain's"),
            Section("Systems", [Table(self._systems(), list(self.systems.items()))]),
            Section("Seeds", [Table(list(self._seeds()), by_seed, notes)]),
        ]
        return View(f"Time of {self.config} to {self.target:.2%}", parts)

    def _systems(self) -> Sequence[Column[tuple[str, SystemRuns]]]:
        own = self.systems[ADTRAIN].seconds if ADTRAIN in self.systems else None

        def seconds(title: str, field: str, rank: int = 0) -> Column[tuple[str, SystemRuns]]:
            return Column(title, lambda row: getattr(row[1].seconds, field, None), SECONDS, rank, minor=rank > 0)

        def accuracy(title: str, field: str, rank: int = 0) -> Column[tuple[str, SystemRuns]]:
            return Column(title, lambda row: getattr(row[1].accuracy, field), ACCURACY, rank, minor=rank > 0)

        def ratio(row: tuple[str, SystemRuns]) -> float | None:
            found = row[1].seconds
            return found.median / own.median if found and own and own.median and row[0] != ADTRAIN else None

        return (
            Column("system", lambda row: row[0], TEXT),
            Column("reached", lambda row: f"{row[1].reached} of {len(row[1].runs)}"),
            seconds("median s", "median"),
            seconds("min", "min", rank=1),
            seconds("max", "max", rank=1),
            Column("ratio", ratio, FACTOR),
            accuracy("accuracy", "mean"),
            accuracy("±", "margin"),
            accuracy("deviation", "deviation", rank=2),
            accuracy("lowest", "min", rank=2),
            Column("loss error", lambda row: self.off.get(row[0]), ERROR, rank=3),
        )

    def _seeds(self) -> Iterator[Column[Sequence[Run]]]:
        yield Column("seed", lambda runs: runs[0].seed)
        for i, name in enumerate(self.systems):
            yield from _of_system(i, name)


SECONDS, ACCURACY = CellFormat("{:.4g}".format), CellFormat("{:.2%}".format)


def _of_system(i: int, name: str) -> tuple[Column[Sequence[Run]], Column[Sequence[Run]]]:
    """The columns of a system's runs, of which there is one for each seed."""
    return (
        Column(f"{name} s", lambda runs: runs[i].seconds, SECONDS),
        Column("accuracy", lambda runs: runs[i].epochs[-1].accuracy, ACCURACY, minor=True),
    )


def result(
    name: str,
    overrides: Sequence[str],
    device: str,
    target: float,
    seeds: int,
    choice: Choice,
    autotune: str,
    progress: Progress,
) -> Race:
    """The race of a config: `seeds` trainings in each system, from training.seed on, in turns.

    Raises:
        ConfigError, DataError: the config is wrong, or its task has no accuracy.
        WorkerFailed: adtrain itself fails.
    """
    cfg = config.load(name, overrides)
    training.check_precision(cfg, device)
    training.check_whole_batches(cfg)
    experiment = training.prepare(cfg)
    fields = experiment.network.task.score_kind._fields
    if "accuracy" not in fields:
        raise cfg.error_at(("loss",), f"found a task with {', '.join(fields)}, expected one with an accuracy")
    load, first, precision = observed_load(progress), cfg.training.seed, cfg.training.precision
    names = [ADTRAIN, *(peer.name for peer in choice.runnable)]
    with started(names, device, thread_count(), autotune) as workers:
        checked = comparison.Losses({}, [], choice.skipped, {})
        if len(workers) > 1:
            progress(f"race: {', '.join(names)}: comparing the first losses")
            checked = comparison.compare_losses(workers, choice, name, [*overrides, *STEP_ONLY], precision)
        systems, failed = _trained(workers, name, overrides, range(first, first + seeds), checked, progress)
    return Race(
        protocol=conditions(device, load, choice),
        config=cfg.name,
        overrides=list(overrides),
        target=target,
        systems={system: _summary(runs, first, target) for system, runs in systems.items()},
        off=checked.off,
        different=checked.different,
        skipped=checked.skipped,
        failed={**checked.failed, **failed},
    )


def _trained(
    workers: Mapping[str, WorkerProcess],
    name: str,
    overrides: Sequence[str],
    seeds: range,
    checked: comparison.Losses,
    progress: Progress,
) -> tuple[dict[str, list[list[Checked]]], dict[str, str]]:
    """The epochs of each system and seed, and why systems failed."""
    gone = {*checked.skipped, *checked.failed, *checked.different} - {ADTRAIN}
    failed: dict[str, str] = {}

    def trained(system: str, left: Iterator[int]) -> list[Checked]:
        seed = next(left)
        found = workers[system].ask("race", config_name=name, overrides=[*overrides, f"training.seed={seed}"])
        epochs = [Checked(*each) for each in found["epochs"]]
        progress(f"race: seed {seed}, {system}: {epochs[-1].accuracy:.2%} after {epochs[-1].seconds:.3f} s")
        return epochs

    samples = {system: partial(trained, system, iter(seeds)) for system in workers if system not in gone}
    return in_turns(samples, len(seeds), failed), failed


def _summary(runs: Sequence[Sequence[Checked]], first: int, target: float) -> SystemRuns:
    """The runs of a system, and what they have in common."""
    reached = [next((each.seconds for each in epochs if each.accuracy >= target), None) for epochs in runs]
    times = [seconds for seconds in reached if seconds is not None]
    return SystemRuns(
        reached=len(times),
        seconds=_spread(times) if times else None,
        train_seconds=_spread([epochs[-1].seconds for epochs in runs]),
        accuracy=_spread([epochs[-1].accuracy for epochs in runs]),
        runs=[
            Run(first + i, list(epochs), seconds) for i, (epochs, seconds) in enumerate(zip(runs, reached, strict=True))
        ],
    )


def _spread(values: Sequence[float]) -> Spread:
    count, deviation, margin = len(values), 0.0, None
    if count > 1:
        deviation = stdev(values)
        margin = t_quantile(count - 1, 0.975) * deviation / sqrt(count)
    return Spread(median(values), min(values), max(values), mean(values), deviation, margin)


def t_quantile(degrees: int, probability: float) -> float:
    """The quantile of Student's t distribution: √degrees tan θ, where θ has a density of cos(θ) ** (degrees - 1)."""
    angles = np.linspace(-pi / 2, pi / 2, 100_001)
    density = np.cos(angles) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return sqrt(degrees) * tan(np.interp(probability * below[-1], below, angles))
