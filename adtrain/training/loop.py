"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby, islice
from time import perf_counter
from typing import NamedTuple

import numpy as np

from adtrain import data
from adtrain.core.array import Array
from adtrain.core.errors import AdtrainError, OutOfMemory
from adtrain.core.staging import Staged
from adtrain.training.evaluation import Score, evaluate
from adtrain.training.examples import Examples, on_device
from adtrain.training.experiment import LOG_ROWS, Experiment
from adtrain.training.memory import too_large
from adtrain.training.progress import Epoch, Interval, Observer
from adtrain.training.step import TrainState, copied, empty_log, repeated

REPORT_SECONDS = 0.1
"""About how long the steps take between two reports of progress, and until Ctrl-C is heard."""


@dataclass(frozen=True)
class Result:
    """A finished training: the last state, scores (`train` as it was while the last epoch ran), and times.

    `train_seconds` is the time in the loop over batches; evaluation is not in it. `step_seconds` holds for each step
    the mean over the steps whose metrics were read together, from their indices on the host to that reading.
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

    Raises:
        OutOfMemory: the step does not fit on the device, with the batch size that would.
        AdtrainError: a loss that is not finite has been read; names the step.
    """
    try:
        return _run(experiment, device, observers)
    except OutOfMemory as error:
        raise too_large(experiment, device) or error from None


def _run(experiment: Experiment, device: str, observers: Sequence[Observer]) -> Result:
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
    batches = list(_batches(experiment, epoch, experiment.total_steps - len(step_seconds)))
    for observer in observers:
        observer.epoch_started(epoch, experiment.epochs, sum(map(len, batches)))
    walk = _Walk(experiment, state, seed, examples)
    walk.compile(batches)
    totals = _Totals(epoch, len(step_seconds))

    def report(unread: _Unread) -> None:
        before = totals.seconds
        interval = totals.add(unread)
        step_seconds.extend([(totals.seconds - before) / len(unread.sizes)] * len(unread.sizes))
        for observer in observers:
            observer.interval_done(interval)

    unread: _Unread | None = None
    for first in range(0, len(batches), LOG_ROWS):
        together = batches[first : first + LOG_ROWS]
        for images in walk.steps(together):
            for observer in observers:
                observer.step_done(images)
            if unread is not None:  # only now, so that a GPU has something to do meanwhile
                report(unread)
                unread = None
        unread = _Unread([x.fetch() for x in walk.log[1:]], list(map(len, together)))
    if unread is not None:
        report(unread)
    return walk.state, totals


class _Walk:
    """Steps on batches that the host gives out many at a time."""

    def __init__(self, experiment: Experiment, state: TrainState, seed: Array, examples: Examples) -> None:
        self.step = experiment.logged_step
        self.state, self.log = state, empty_log(LOG_ROWS, seed.device)
        self.seed, self.examples = seed, examples
        self.at_once = 1  # steps between two reports of progress

    def compile(self, batches: Sequence[np.ndarray]) -> None:
        """Compile the step for the sizes of these batches: what is done once is not part of any step's time."""
        if isinstance(self.step, Staged):
            for size in {len(indices) for indices in batches}:
                given = self.examples.batches(np.zeros((LOG_ROWS, size), np.int64))
                self.step.compile(self.state, self.log, self.seed, *given)

    def steps(self, batches: Sequence[np.ndarray]) -> Iterator[int]:
        """Take a step on each of at most LOG_ROWS batches, with a log of their own; says how many images are done."""
        self.log, done = empty_log(LOG_ROWS, self.seed.device), 0
        for size, alike in groupby(batches, key=len):
            rows = list(alike)
            order = np.zeros((LOG_ROWS, size), np.int64)
            order[done : done + len(rows)] = rows
            given = self.examples.batches(order)
            end = done + len(rows)
            while done < end:
                before, times = perf_counter(), min(self.at_once, end - done)
                self.state, self.log = repeated(self.step, times, (self.state, self.log), self.seed, *given)
                self.at_once = max(1, int(REPORT_SECONDS / max((perf_counter() - before) / times, 1e-9)))
                done += times
                yield times * size


def continuation(experiment: Experiment, state: TrainState, device: str = "cpu") -> Callable[[int], TrainState]:
    """A function that takes so many more steps each time it is called, for measuring; the caller keeps `state`.

    It returns the new state, which lasts until the next call. Only batches of the full size are used, so that all
    steps do the same work.
    """
    examples = on_device(experiment.train, device)
    walk = _Walk(experiment, copied(state), experiment.seed(device), examples)
    epochs = (_batches(experiment, experiment.epochs + i) for i in count(1))
    full = (indices for batches in epochs for indices in batches if len(indices) == experiment.full_batch)

    def take_steps(times: int = 1) -> TrainState:
        for done in range(0, times, LOG_ROWS):
            for _ in walk.steps(list(islice(full, min(times - done, LOG_ROWS)))):
                pass
        return walk.state

    return take_steps


def _batches(experiment: Experiment, epoch: int, at_most: int | None = None) -> Iterator[np.ndarray]:
    training = experiment.config.training
    return islice(data.batches(len(experiment.train), experiment.config.data.batch_size, training.seed, epoch), at_most)


class _Unread(NamedTuple):
    """The metrics of steps on batches of these sizes, on their way to the host: losses, correct answers, rates."""

    columns: Sequence[Callable[[], np.ndarray]]
    sizes: Sequence[int]


class _Totals:
    """Sums over the images of an epoch, which begins now, after so many steps of the run."""

    def __init__(self, epoch: int, steps: int) -> None:
        self.epoch, self.steps = epoch, steps
        self.started = perf_counter()
        self.loss = self.seconds = 0.0
        self.correct = self.images = 0

    def add(self, unread: _Unread) -> Interval:
        """Wait for the metrics of the next steps, and add them."""
        sizes = unread.sizes
        losses, rights, rates = (wait()[: len(sizes)] for wait in unread.columns)
        for i, loss in enumerate(losses.tolist(), self.steps + 1):
            if not math.isfinite(loss):
                raise AdtrainError(
                    f"the loss is {loss} at step {i} (epoch {self.epoch}), training stopped: "
                    "lower the optimizer's lr, or set training.clip_norm"
                )
        loss, correct, images = float(np.dot(losses, sizes)), int(rights.sum()), sum(sizes)
        seconds = perf_counter() - self.started
        rate = images / (seconds - self.seconds)
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images
        self.seconds, self.steps = seconds, self.steps + len(sizes)
        return Interval(self.epoch, self.steps, Score(loss / images, correct / images), float(rates[-1]), rate)

    def score(self) -> Score:
        return Score(self.loss / self.images, self.correct / self.images)
