"""Times training steps on the CPU and the GPU: of a config, over batch sizes, by layer, and over widths and depths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from adtrain import config, training
from adtrain.backends.cpu import naive
from adtrain.bench.analysis.ops import COPIES, LabelledDevice, compared, crossovers
from adtrain.bench.steps.modes import SAMPLE_MS
from adtrain.bench.timing.sampling import Workload, alternate, repeatedly
from adtrain.core.backend import backend
from adtrain.core.hooks import Hook, hook
from adtrain.core.program import Program
from adtrain.data import Split
from adtrain.training.step import empty_log, repeated

NaiveStep = Callable[[training.Experiment], Callable[[], object]]
"""From an experiment to a function that runs a training step by naive loops, on one thread."""

BATCHES = (32, 128, 512, 2048)
WIDTHS, DEPTHS = (64, 256, 1024, 4096), (1, 2, 4, 8, 16)
WIDTH, DEPTH = 256, 2
"""The fixed width, or depth, of the hidden layers while the other one varies."""

LAYER_STEPS = 9
"""A layer's time is the median over this many steps."""


def hidden_layers(width: int, depth: int) -> str:
    """The override of a config's layers: `depth` hidden linear layers with relu, and 10 classes."""
    hidden = f"{{linear: {width}}}, relu, " * depth
    return f"model.layers=[{hidden}{{linear: 10}}]"


def step(
    name: str, overrides: Sequence[str], devices: Sequence[LabelledDevice], naive_step: NaiveStep | None = None
) -> dict[str, Any]:
    """The step of a config: by naive loops if given, on each device, and with copies of each batch to the device and of
    the loss back."""
    experiment = training.prepare(config.load(name, overrides))
    workloads = {naive.LABEL: repeatedly(naive_step(experiment))} if naive_step else {}
    workloads |= _workloads(experiment, devices)
    for label, device in devices[1:]:
        workloads[label + COPIES] = _with_copies(experiment, device)
    about = {"config": experiment.config.name, "overrides": list(overrides), "batch_size": experiment.full_batch}
    return {**about, **compared(alternate(workloads, min_sample_ms=SAMPLE_MS), devices[0].label)}


def over_batches(name: str, overrides: Sequence[str], devices: Sequence[LabelledDevice]) -> dict[str, Any]:
    """The step of a config at each batch size in BATCHES, up to the number of images."""
    experiment = training.prepare(config.load(name, overrides))
    sizes = [size for size in BATCHES if size <= len(experiment.train)]
    changes = [(size, [*overrides, f"data.batch_size={size}"]) for size in sizes]
    return {"of": experiment.config.name, **_over("batch", name, changes, devices)}


def over_widths(name: str, devices: Sequence[LabelledDevice]) -> dict[str, Any]:
    """The config's step with DEPTH hidden layers of several widths."""
    changes = [(width, [hidden_layers(width, DEPTH)]) for width in WIDTHS]
    return {"of": f"{DEPTH} hidden layers", **_over("width", name, changes, devices)}


def over_depths(name: str, devices: Sequence[LabelledDevice]) -> dict[str, Any]:
    """The config's step with several numbers of hidden layers of WIDTH."""
    changes = [(depth, [hidden_layers(WIDTH, depth)]) for depth in DEPTHS]
    return {"of": f"hidden layers of {WIDTH}", **_over("depth", name, changes, devices)}


def layers(name: str, overrides: Sequence[str], devices: Sequence[LabelledDevice]) -> list[dict[str, Any]]:
    """The milliseconds of each layer, all phases together, with a kernel for each operation."""
    experiment = training.prepare(config.load(name, overrides), training.Mode.STAGED)
    by_label = {label: dict(_layer_times(experiment, device)) for label, device in devices}
    first = devices[0].label
    return [
        {"layer": scope, "ms": {label: found.get(scope, 0.0) for label, found in by_label.items()}}
        for scope in by_label[first]
    ]


def _over(
    what: str, name: str, changes: Sequence[tuple[int, Sequence[str]]], devices: Sequence[LabelledDevice]
) -> dict[str, Any]:
    rows = []
    for size, overrides in changes:
        experiment = training.prepare(config.load(name, overrides))
        found = alternate(_workloads(experiment, devices), min_sample_ms=SAMPLE_MS)
        rows.append({what: size, **compared(found, devices[0].label)})
    return {"over": what, "rows": rows, "crossover": crossovers(rows, what)}


def _workloads(experiment: training.Experiment, devices: Sequence[LabelledDevice]) -> dict[str, Workload]:
    """On each device, steps as in training, with the data set on the device."""

    def on(device: str) -> Workload:
        run_steps = training.continuation(experiment, experiment.initial_state(device), device)

        def workload(times: int) -> None:
            run_steps(times)
            backend(device).synchronize()

        return workload

    return {label: on(device) for label, device in devices}


def _with_copies(experiment: training.Experiment, device: str) -> Workload:
    """Steps that each copy a batch of uint8 images and int64 labels to the device, and the loss back."""
    size, train = experiment.full_batch, experiment.train
    batch = Split(np.ascontiguousarray(train.images[:size]), np.ascontiguousarray(train.labels[:size]))
    state, seed, task = experiment.initial_state(device), experiment.seed(device), experiment.network.task

    def workload(times: int) -> None:
        nonlocal state
        for _ in range(times):
            given = training.on_device(batch, device).batches(np.arange(size)[None])
            state, log = repeated(experiment.logged_step, 1, (state, empty_log(task, 1, device)), seed, *given)
            log.loss.numpy()

    return workload


class _LayerTimer(Hook):
    """Sums up the seconds of a Program's equations by scope."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def program(self, program: Program, seconds: Sequence[float]) -> None:
        for equation, elapsed in zip(program.equations, seconds, strict=True):
            self.seconds[equation.scope] += elapsed


def _layer_times(experiment: training.Experiment, device: str) -> Iterator[tuple[str, float]]:
    """Scope and milliseconds by the device's clock, in the order of the first run."""
    run_steps = training.continuation(experiment, experiment.initial_state(device), device)
    run_steps(1)
    timers = []
    for _ in range(LAYER_STEPS):
        timers.append(_LayerTimer())
        with hook(timers[-1]):
            run_steps(1)
    for scope in timers[0].seconds:
        yield scope, median(timer.seconds[scope] for timer in timers) * 1e3
