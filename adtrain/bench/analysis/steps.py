"""Training steps on the CPU and the GPU: a config's as it is, over batch sizes and by layer; networks that grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from adtrain import config, training
from adtrain.backends.cpu import naive
from adtrain.bench.analysis.ops import TRANSFERS, Contestant, called, compared, crossovers
from adtrain.bench.steps.modes import SAMPLE_MS
from adtrain.bench.timing.sampling import Work, alternate
from adtrain.core.backend import backend
from adtrain.core.hooks import Hook, hook
from adtrain.core.program import Program
from adtrain.data import Split
from adtrain.training.step import empty_log, repeated

NaiveStep = Callable[[training.Experiment], Callable[[], object]]
"""Makes of an experiment a function that takes a training step by naive loops, on one thread."""

BATCHES = (32, 128, 512, 2048)
WIDTHS, DEPTHS = (64, 256, 1024, 4096), (1, 2, 4, 8, 16)
WIDTH, DEPTH = 256, 2
"""Of the hidden layers of the networks that grow in the other direction."""

LAYER_STEPS = 9
"""Steps of which the median is a layer's time."""


def grown(width: int, depth: int) -> str:
    """The override of a config's layers: so many hidden linear layers with relu, for 10 classes."""
    hidden = f"{{linear: {width}}}, relu, " * depth
    return f"model.layers=[{hidden}{{linear: 10}}]"


def step(
    name: str, overrides: Sequence[str], contestants: Sequence[Contestant], naive_step: NaiveStep | None = None
) -> dict[str, Any]:
    """The step of a config: by naive loops if they are given, on each device, and with each batch brought there and its
    loss back."""
    experiment = training.prepare(config.load(name, overrides))
    works = {naive.LABEL: called(naive_step(experiment))} if naive_step else {}
    works |= _works(experiment, contestants)
    for label, device in contestants[1:]:
        works[label + TRANSFERS] = _with_transfers(experiment, device)
    about = {"config": experiment.config.name, "overrides": list(overrides), "batch_size": experiment.full_batch}
    return {**about, **compared(alternate(works, min_sample_ms=SAMPLE_MS), contestants[0].label)}


def over_batches(name: str, overrides: Sequence[str], contestants: Sequence[Contestant]) -> dict[str, Any]:
    """The step of a config at other batch sizes, as far as there are images."""
    experiment = training.prepare(config.load(name, overrides))
    sizes = [size for size in BATCHES if size <= len(experiment.train)]
    changes = [(size, [*overrides, f"data.batch_size={size}"]) for size in sizes]
    return {"of": experiment.config.name, **_over("batch", name, changes, contestants)}


def over_widths(name: str, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """Networks of DEPTH hidden layers of several widths, trained as the config says."""
    changes = [(width, [grown(width, DEPTH)]) for width in WIDTHS]
    return {"of": f"{DEPTH} hidden layers", **_over("width", name, changes, contestants)}


def over_depths(name: str, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """Networks of several hidden layers of WIDTH, trained as the config says."""
    changes = [(depth, [grown(WIDTH, depth)]) for depth in DEPTHS]
    return {"of": f"hidden layers of {WIDTH}", **_over("depth", name, changes, contestants)}


def layers(name: str, overrides: Sequence[str], contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """The milliseconds of each layer, forward, backward and update together, each operation as a kernel of its own."""
    experiment = training.prepare(config.load(name, overrides), training.Mode.STAGED)
    by_label = {label: dict(_layer_times(experiment, device)) for label, device in contestants}
    first = contestants[0].label
    return [
        {"layer": scope, "ms": {label: found.get(scope, 0.0) for label, found in by_label.items()}}
        for scope in by_label[first]
    ]


def _over(
    what: str, name: str, changes: Sequence[tuple[int, Sequence[str]]], contestants: Sequence[Contestant]
) -> dict[str, Any]:
    rows = []
    for size, overrides in changes:
        experiment = training.prepare(config.load(name, overrides))
        found = alternate(_works(experiment, contestants), min_sample_ms=SAMPLE_MS)
        rows.append({what: size, **compared(found, contestants[0].label)})
    return {"over": what, "rows": rows, "crossover": crossovers(rows, what)}


def _works(experiment: training.Experiment, contestants: Sequence[Contestant]) -> dict[str, Work]:
    """On each device, steps as training takes them: the data set lies there."""

    def on(device: str) -> Work:
        take = training.continuation(experiment, experiment.initial_state(device), device)

        def work(times: int) -> None:
            take(times)
            backend(device).synchronize()

        return work

    return {label: on(device) for label, device in contestants}


def _with_transfers(experiment: training.Experiment, device: str) -> Work:
    """Steps whose batch comes from the host each, as uint8 images and int64 labels, and whose loss goes back."""
    size, train = experiment.full_batch, experiment.train
    batch = Split(np.ascontiguousarray(train.images[:size]), np.ascontiguousarray(train.labels[:size]))
    state, seed = experiment.initial_state(device), experiment.seed(device)

    def work(times: int) -> None:
        nonlocal state
        for _ in range(times):
            given = training.on_device(batch, device).batches(np.arange(size)[None])
            state, log = repeated(experiment.logged_step, 1, (state, empty_log(1, device)), seed, *given)
            log.loss.numpy()

    return work


class _LayerTimer(Hook):
    """Sums up the seconds of a Program's equations by scope."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def program(self, program: Program, seconds: Sequence[float]) -> None:
        for equation, elapsed in zip(program.equations, seconds, strict=True):
            self.seconds[equation.scope] += elapsed


def _layer_times(experiment: training.Experiment, device: str) -> Iterator[tuple[str, float]]:
    """Scope and milliseconds, by the device's own clock, in the order in which they first run."""
    take = training.continuation(experiment, experiment.initial_state(device), device)
    take(1)
    timers = []
    for _ in range(LAYER_STEPS):
        timers.append(_LayerTimer())
        with hook(timers[-1]):
            take(1)
    for scope in timers[0].seconds:
        yield scope, median(timer.seconds[scope] for timer in timers) * 1e3
