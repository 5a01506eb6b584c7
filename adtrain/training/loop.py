"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from time import perf_counter

import numpy as np

from adtrain import data
from adtrain.core.array import Array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import Staged
from adtrain.training.evaluation import Score, evaluate
from adtrain.training.examples import Examples, on_device
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Epoch, Interval, Observer
from adtrain.training.step import StepMetrics, TrainState, copied

LOG_EVERY = 20
"""Steps between two readings of the metrics, each of which waits for the device."""


@dataclass(frozen=True)
class Result:
    """A finished training: the last state, scores (`train` as it was while the last epoch ran), and times.

    `train_seconds` is the time in the loop over batches; evaluation is not in it. `step_seconds` holds the time from
    a batch's indices on the host to the step's return, for each step.
    """

    state: TrainState
    train: Score
    validation: Score | None
    test: Score
    epochs: int
    steps: int
    images: int
    train_seconds: float
    step_seconds: Sequence[float]


def run(experiment: Experiment, device: str = "cpu", observers: Sequence[Observer] = ()) -> Result:
    """Train from the initial state to the last step, and evaluate.

    Raises AdtrainError, naming the step, as soon as a loss that is not finite has been read.
    """
    state, seed = experiment.initial_state(device), experiment.seed(device)
    examples = on_device(experiment.train, device)
    held_out = on_device(experiment.validation, device) if experiment.validation is not None else None
    step_seconds: list[float] = []
    train_seconds, images = 0.0, 0
    for epoch in range(1, experiment.epochs + 1):
        state, totals = _train_epoch(experiment, epoch, state, seed, examples, step_seconds, observers)
        train_seconds += totals.seconds
        images += totals.images
        train, validation = totals.score(), None
        if held_out is not None:
            validation = evaluate(experiment.evaluation_step, state.params, state.statistics, held_out, "validation")
        done = Epoch(epoch, len(step_seconds), train, validation, totals.seconds, totals.images / totals.seconds)
        for observer in observers:
            observer.epoch_done(done, state)
    test = evaluate(experiment.evaluation_step, state.params, state.statistics, on_device(experiment.test, device))
    return Result(state, train, validation, test, epoch, len(step_seconds), images, train_seconds, step_seconds)


def _compile(
    experiment: Experiment, state: TrainState, seed: Array, examples: Examples, batches: Sequence[np.ndarray]
) -> None:
    """Compile the step for the sizes of these batches: what is done once is not part of any step's time."""
    step = experiment.train_step
    if isinstance(step, Staged):
        for indices in {len(indices): indices for indices in batches}.values():
            step.compile(state, seed, *examples.batch(indices))


def _train_epoch(
    experiment: Experiment,
    epoch: int,
    state: TrainState,
    seed: Array,
    examples: Examples,
    step_seconds: list[float],
    observers: Sequence[Observer],
) -> tuple[TrainState, _Totals]:
    """One pass, as far as the run's steps go; the time of each step is appended to `step_seconds`."""
    step = experiment.train_step
    batches = list(_batches(experiment, epoch, experiment.total_steps - len(step_seconds)))
    for observer in observers:
        observer.epoch_started(epoch, experiment.epochs, sum(map(len, batches)))
    _compile(experiment, state, seed, examples, batches)
    totals = _Totals(epoch)
    pending: list[tuple[StepMetrics, int]] = []
    started = perf_counter()
    for position, indices in enumerate(batches, 1):
        before = perf_counter()
        state, metrics = step(state, seed, *examples.batch(indices))
        step_seconds.append(perf_counter() - before)
        pending.append((metrics, len(indices)))
        for observer in observers:
            observer.step_done(len(indices))
        if position % LOG_EVERY == 0 or position == len(batches):
            interval = totals.read(pending, len(step_seconds), started)
            pending.clear()
            for observer in observers:
                observer.interval_done(interval)
    return state, totals


def continuation(experiment: Experiment, state: TrainState, device: str = "cpu") -> Callable[[], TrainState]:
    """A function that takes one more step each time it is called, for measuring; whoever holds `state` keeps theirs.

    It returns the new state, which lasts until the next call. Only batches of the full size are used, so that every
    call does the same work.
    """
    step, seed, examples = experiment.train_step, experiment.seed(device), on_device(experiment.train, device)
    state = copied(state)
    epochs = (_batches(experiment, experiment.epochs + i) for i in count(1))
    full = (indices for batches in epochs for indices in batches if len(indices) == experiment.full_batch)

    def take_step() -> TrainState:
        nonlocal state
        state, _ = step(state, seed, *examples.batch(next(full)))
        return state

    return take_step


def _batches(experiment: Experiment, epoch: int, at_most: int | None = None) -> Iterator[np.ndarray]:
    training = experiment.config.training
    return islice(data.batches(len(experiment.train), experiment.config.data.batch_size, training.seed, epoch), at_most)


class _Totals:
    """Sums over the images of an epoch, read from the device an interval at a time."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.loss = self.seconds = 0.0
        self.correct = self.images = 0

    def read(self, pending: Sequence[tuple[StepMetrics, int]], step: int, started: float) -> Interval:
        """Add the metrics of the last steps, of which `step` is the latest; the epoch began at the time `started`."""
        loss, correct, images = 0.0, 0, 0
        for i, (metrics, size) in enumerate(pending, step - len(pending) + 1):
            batch_loss = float(metrics.loss)
            if not math.isfinite(batch_loss):
                raise AdtrainError(
                    f"the loss is {batch_loss} at step {i} (epoch {self.epoch}), training stopped: "
                    "lower the optimizer's lr, or set training.clip_norm"
                )
            loss += batch_loss * size
            correct += int(metrics.correct)
            images += size
        seconds = perf_counter() - started
        rate = images / (seconds - self.seconds)
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images
        self.seconds = seconds
        score = Score(loss / images, correct / images)
        return Interval(self.epoch, step, score, float(pending[-1][0].learning_rate), rate)

    def score(self) -> Score:
        return Score(self.loss / self.images, self.correct / self.images)
