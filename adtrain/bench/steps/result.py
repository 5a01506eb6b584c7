"""The result of `adtrain bench step`: the config's step in each mode, its memory, and its timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adtrain import config, training
from adtrain.bench.steps.memory import held_bytes
from adtrain.bench.steps.modes import SAMPLE_MS, ModeBench, bench_batches, bench_modes, record
from adtrain.bench.steps.trace import trace_step
from adtrain.bench.timing.protocol import observed_load, protocol
from adtrain.bench.timing.roofline import known_or_measured
from adtrain.core.errors import AdtrainError
from adtrain.training import Experiment, Mode
from adtrain.training.costs import planned_peak


def result(
    path: str, overrides: Sequence[str], device: str, batch_sizes: Sequence[int], progress: Callable[[str], object]
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """The result as JSON values, and a function that runs one step in each mode and returns the timeline.

    Args:
        progress: called with a line for the user.

    Raises:
        AdtrainError: a batch size exceeds the number of training examples.
        ConfigError, DataError: the config is wrong, or its batch size exceeds the number of training examples.
    """
    experiment, *others = _prepared(path, overrides, device, batch_sizes)
    # First of all, because other arrays would count as well.
    memory = {"planned_bytes": planned_peak(experiment, device), "held_bytes": held_bytes(experiment, device)}
    load = observed_load(progress)
    peak, precision = known_or_measured(device, progress), experiment.config.training.precision
    conditions = protocol(device, load, peak, SAMPLE_MS)
    progress(f"bench: timing steps of {experiment.config.name} in each mode, some seconds")
    modes = bench_modes(experiment, device)
    found = {
        "kind": "config",
        "protocol": conditions,
        "config": experiment.config.name,
        "precision": precision,
        "batch_size": experiment.full_batch,
        "memory": memory,
        "modes": {name: record(mode, peak, precision) for name, mode in modes.items()},
        "batch_sizes": bench_batches({e.full_batch: e for e in others}, peak, device) if others else {},
    }
    return found, lambda: {"traceEvents": _traced(experiment, modes, device), "otherData": conditions}


def _prepared(path: str, overrides: Sequence[str], device: str, batch_sizes: Sequence[int]) -> list[Experiment]:
    """The config's experiment, and one for each batch size."""
    changes = [[], *([f"data.batch_size={n}"] for n in batch_sizes)]
    configs = [config.load(path, [*overrides, *change]) for change in changes]
    training.check_precision(configs[0], device)
    first = training.prepare(configs[0])
    if (size := configs[0].data.batch_size) > (count := len(first.train)):
        expected = f"expected at most {count:,}, the number of training examples"
        raise configs[0].error_at(("data", "batch_size"), f"found {size}, {expected}")
    for n in batch_sizes:
        if n > count:
            raise AdtrainError(f"--batch-sizes {n}: there are {count:,} training examples")
    return [first, *map(training.prepare, configs[1:])]


def _traced(experiment: Experiment, modes: Mapping[str, ModeBench], device: str) -> list[dict[str, Any]]:
    """The events of one step in each mode."""
    events = []
    for pid, (name, mode) in enumerate(modes.items(), 1):
        same = replace(experiment, mode=Mode(name))
        run_steps = training.continuation(same, same.initial_state(device), device)
        run_steps(1)
        kernels = {key: [kernel.name for kernel in found] for key, found in mode.kernels.items()}
        events += trace_step(pid, name, run_steps, kernels, device)
    return events
