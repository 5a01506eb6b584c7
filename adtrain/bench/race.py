"""A race: whole trainings of a config in several systems, and the time until each reaches a test accuracy.

All systems start from the same weights and take the same batches at the same learning rates. The clock runs while they
train: from the upload of the order of an epoch's batches until the device has finished its last step. Compilation,
warm-up and evaluation are not counted. After each epoch adtrain computes the test accuracy of the system's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any, cast

from adtrain import config, training
from adtrain.bench.peers import comparison
from adtrain.bench.peers.jobs import Checked, Job
from adtrain.bench.peers.processes import WorkerFailed, WorkerProcess, started
from adtrain.bench.peers.result import Progress, conditions
from adtrain.bench.peers.systems import ADTRAIN, SYSTEMS, Choice, load
from adtrain.bench.timing.machine import thread_count
from adtrain.bench.timing.protocol import observed_load

STEP_ONLY = ("schedule=constant", "data.augment=null")
"""Overrides for the comparison of the first losses, in which schedule and random numbers have no part."""


def run(name: str, job: Job) -> list[Checked]:
    """Train in one system; its epochs. Raises Unsupported where it has no counterpart of something in the job."""
    system = SYSTEMS[name]
    return cast(list[Checked], load(system).race(job, system.form))


def result(
    name: str,
    overrides: Sequence[str],
    device: str,
    target: float,
    seeds: int,
    choice: Choice,
    autotune: str,
    progress: Progress,
) -> dict[str, Any]:
    """The race of a config as JSON values: `seeds` trainings in each system, from training.seed on, in turns.

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
        checked = comparison.Losses({}, [], {}, {})
        if len(workers) > 1:
            progress(f"race: {', '.join(names)}: comparing the first losses")
            checked = comparison.compare_losses(workers, name, [*overrides, *STEP_ONLY], precision)
        systems, failed = _trained(workers, name, overrides, range(first, first + seeds), checked, progress)
    return {
        "kind": "race",
        "protocol": conditions(device, load, choice),
        "config": cfg.name,
        "overrides": list(overrides),
        "target": target,
        "systems": {system: _summary(runs, first, target) for system, runs in systems.items()},
        "off": dict(checked.errors),
        "different": list(checked.different),
        "skipped": {**choice.skipped, **checked.skipped},
        "failed": {**checked.failed, **failed},
    }


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
    systems: dict[str, list[list[Checked]]] = {name: [] for name in workers if name not in gone}
    failed: dict[str, str] = {}
    for seed in seeds:
        for system in list(systems):
            try:
                found = workers[system].ask("race", config_name=name, overrides=[*overrides, f"training.seed={seed}"])
            except WorkerFailed as reason:
                if system == ADTRAIN:
                    raise
                failed[system] = str(reason)
                del systems[system]
                continue
            epochs = [Checked(*each) for each in found["epochs"]]
            systems[system].append(epochs)
            progress(f"race: seed {seed}, {system}: {epochs[-1].accuracy:.2%} after {epochs[-1].seconds:.3f} s")
    return systems, failed


def _summary(runs: Sequence[Sequence[Checked]], first: int, target: float) -> dict[str, Any]:
    """The runs of a system, and what they have in common. `seconds` is None where the target was not reached."""
    reached = [next((each.seconds for each in epochs if each.accuracy >= target), None) for epochs in runs]
    times = [seconds for seconds in reached if seconds is not None]
    return {
        "reached": len(times),
        "seconds": _spread(times) if times else None,
        "train_seconds": _spread([epochs[-1].seconds for epochs in runs]),
        "accuracy": _spread([epochs[-1].accuracy for epochs in runs]),
        "runs": [
            {"seed": first + i, "epochs": [each._asdict() for each in epochs], "seconds": reached[i]}
            for i, epochs in enumerate(runs)
        ],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "mean": mean(values),
        "deviation": deviation,
    }
