"""A training from its first or any later step to its end: epochs, evaluation, checkpoints, and reasons to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, NoReturn

import numpy as np

from adtrain.core.errors import AdtrainError, OutOfMemory
from adtrain.data import Split
from adtrain.training import not_finite
from adtrain.training.best import Best
from adtrain.training.checkpoint import Checkpoint, Progress, fetch, finite
from adtrain.training.endings import Interrupted, NotFinite, Result, ended
from adtrain.training.evaluation import Score, evaluate
from adtrain.training.examples import on_device
from adtrain.training.experiment import LOG_ROWS, Experiment
from adtrain.training.loop import Walk, batches_of
from adtrain.training.memory import too_large
from adtrain.training.progress import Epoch, Interval, Observer
from adtrain.training.step import TrainState

MARK_SECONDS = 1.0
"""About how often a copy of the state is kept to go back to, should a number turn out not to be finite."""


class Start(NamedTuple):
    """Where a training goes on: a checkpoint, and that of the best epoch so far, where there has been one."""

    checkpoint: Checkpoint
    best: Checkpoint | None


def run(
    experiment: Experiment,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    start: Start | None = None,
    stop: Callable[[], bool] = lambda: False,
    every_step_checked: bool = False,
) -> Result:
    """Train from the initial state, or from `start`, to the last step, and evaluate.

    `stop` is asked every REPORT_SECONDS. With `every_step_checked` a number that is not finite is met a step after it
    is made, instead of a second, at the price of reading the state after each step.

    Raises:
        Interrupted: `stop` said so.
        OutOfMemory: the step does not fit on the device, with the batch size that would.
        NotFinite: a loss, or a number of the state, is not finite; names the step, the operation and its layer.
    """
    try:
        return _Training(experiment, device, observers, start, stop, every_step_checked).run()
    except OutOfMemory as error:
        raise too_large(experiment, device) or error from None


class _Unread(NamedTuple):
    """Steps whose metrics are on their way to the host, and the state after them where it is to be kept."""

    columns: Sequence[Callable[[], np.ndarray]]  # losses, correct answers, rates
    row: int  # of the first step in the columns
    sizes: Sequence[int]
    state: Callable[[], TrainState] | None
    to_disk: bool


class _Training:
    def __init__(
        self,
        experiment: Experiment,
        device: str,
        observers: Sequence[Observer],
        start: Start | None,
        stop: Callable[[], bool],
        every_step_checked: bool,
    ) -> None:
        self.experiment, self.device, self.observers = experiment, device, observers
        self.stop, self.every_step_checked = stop, every_step_checked
        if start is None:
            state = experiment.initial_state(device)
            self.kept = Checkpoint(fetch(state)(), Progress(Best(experiment.best_by)))  # to go back to
        else:
            self.kept, state = start.checkpoint, start.checkpoint.on_device(device)
        self.restores_best = experiment.config.training.early_stopping is not None
        self.best = start.best if start is not None and self.restores_best else None
        self.progress = self.kept.progress
        self.examples = on_device(experiment.train, device)
        self.walk = self._walk(state, ())
        self.step_seconds: list[float] = []
        self.images = 0
        self.marked = self.read_at = perf_counter()

    def run(self) -> Result:
        while (reason := ended(self.experiment, self.progress)) is None:
            self._epoch()
        progress, state = self.progress, self.walk.state
        if restored := self.best is not None and self.best.progress.step != progress.step:
            state = self.best.on_device(self.device)
        assert progress.train is not None, "what has ended has been evaluated"
        return Result(
            state=state,
            restored=restored,
            ended=reason,
            best=progress.best,
            train=progress.train,
            validation=progress.validation,
            test=self._score(state, self.experiment.test, "test"),
            epochs=progress.epochs_done,
            steps=progress.step,
            images=self.images,
            train_seconds=sum(self.step_seconds),
            step_seconds=self.step_seconds,
        )

    def _walk(self, state: TrainState, batches: Sequence[np.ndarray]) -> Walk:
        return Walk(self.experiment, state, self.experiment.seed(self.device), self.examples, batches)

    def _epoch(self) -> None:
        """What is left of the epoch, as far as the run's steps go, and its evaluation."""
        progress, first = self.progress, len(self.step_seconds)
        batches = list(batches_of(self.experiment, progress.epoch))[progress.batches :]
        batches = batches[: self.experiment.total_steps - progress.step]
        images = sum(map(len, batches))
        for observer in self.observers:
            observer.epoch_started(progress.epoch, self.experiment.epochs, images)
        self._steps(batches)
        validation = self.experiment.validation
        score = None if validation is None else self._score(self.walk.state, validation, "validation")
        self._epoch_over(score, images, sum(self.step_seconds[first:]))

    def _steps(self, batches: Sequence[np.ndarray]) -> None:
        """Take a step on each of these batches, the next ones of the epoch; `kept` is the state after them.

        Metrics are read when the next steps are already under way, so that a GPU has something to do meanwhile.
        """
        self.walk = self._walk(self.walk.state, batches)
        self.walk.compile(set(map(len, batches)))
        self.read_at = perf_counter()
        stopping, unread = False, None
        for first, end, to_disk in self._intervals(len(batches)):
            done, row = first, self.walk.row
            for steps, images in self.walk.steps(end - first):
                done += steps
                for observer in self.observers:
                    observer.step_done(images)
                if unread is not None:
                    self._read(unread)
                    unread = None
                if stopping := self.stop():
                    break
            keep = stopping or to_disk or end == len(batches)
            unread = self._unread(row, list(map(len, batches[first:done])), keep, to_disk)
            if stopping:
                break
        if unread is not None:
            self._read(unread)
        if stopping:
            self._leave()

    def _intervals(self, count: int) -> Iterator[tuple[int, int, bool]]:
        """The next `count` batches in parts after which metrics are read, and whether a checkpoint is due then."""
        every, progress = self.experiment.config.training.checkpoint_every, self.progress
        rows, first = 1 if self.every_step_checked else LOG_ROWS, 0
        for end in range(1, count + 1):
            due = every is not None and (progress.step + end) % every == 0
            if due or end == count or end % rows == 0:
                yield first, end, due and end < count
                first = end

    def _unread(self, row: int, sizes: Sequence[int], keep: bool, to_disk: bool) -> _Unread:
        """What the steps of an interval, logged from `row` on, have left on the device."""
        if keep := keep or self.every_step_checked or perf_counter() - self.marked >= MARK_SECONDS:
            self.marked = perf_counter()
        columns = [x.fetch() for x in self.walk.log[1:]]
        return _Unread(columns, row, sizes, fetch(self.walk.state) if keep else None, to_disk)

    def _read(self, unread: _Unread) -> None:
        """Wait for the metrics of these steps, and for the state after them where there is one."""
        sizes, images = unread.sizes, sum(unread.sizes)
        losses, rights, rates = (wait()[unread.row :][: len(sizes)] for wait in unread.columns)
        state = None if unread.state is None else unread.state()
        if not np.isfinite(losses).all() or (state is not None and not finite(state)):
            self._look_back(self.progress.step + len(sizes))
        correct = int(rights.sum())
        self.progress = self.progress.after(losses.tolist(), correct, sizes)
        now = perf_counter()
        seconds, self.read_at = now - self.read_at, now
        self.step_seconds += [seconds / len(sizes)] * len(sizes)
        self.images += images
        score = Score(float(np.dot(losses, sizes)) / images, correct / images)
        interval = Interval(self.progress.epoch, self.progress.step, score, float(rates[-1]), images / seconds)
        for observer in self.observers:
            observer.interval_done(interval)
        if state is not None:
            self.kept = Checkpoint(state, self.progress)
            if unread.to_disk:
                self._hand_out()

    def _epoch_over(self, validation: Score | None, images: int, seconds: float) -> None:
        progress, stopping = self.progress, self.experiment.config.training.early_stopping
        train = progress.score()
        best = progress.best.after(progress.epoch, train, validation, stopping.min_delta if stopping else 0.0)
        done = Epoch(progress.epoch, progress.step, train, validation, seconds, images / seconds if seconds else 0.0)
        is_best = (best.epoch, best.value) != (progress.best.epoch, progress.best.value)
        self.progress = progress.evaluated_as(best, train, validation, self.experiment.steps_per_epoch)
        self.kept = Checkpoint(self.kept.state, self.progress)
        if is_best and self.restores_best:
            self.best = self.kept
        for observer in self.observers:
            observer.epoch_done(done, self.walk.state)
        self._hand_out(is_best)

    def _score(self, state: TrainState, split: Split, name: str) -> Score:
        def between() -> None:
            if self.stop():
                self._leave()

        examples = on_device(split, self.device)
        return evaluate(self.experiment.evaluation_step, state.params, state.statistics, examples, name, between)

    def _hand_out(self, is_best: bool = False) -> None:
        for observer in self.observers:
            observer.checkpoint(self.kept, is_best)

    def _leave(self) -> NoReturn:
        self._hand_out()
        for observer in self.observers:
            observer.stopped("interrupted", self.kept.progress)
        raise Interrupted(self.kept.progress)

    def _look_back(self, last: int) -> NoReturn:
        """Take the steps since `kept` up to number `last` again, to keep the state before the first that overflows.

        A step gives the same bits each time, so it is the one that overflowed before.
        """
        device, progress = self.device, self.kept.progress
        first = progress.step + 1
        batches = list(batches_of(self.experiment, progress.epoch))[progress.batches :][: last - progress.step]
        walk = self._walk(self.kept.on_device(device), batches)
        for batch in batches:
            row = walk.row
            for _ in walk.steps(1):
                losses, rights, _ = (x.numpy()[row : row + 1] for x in walk.log[1:])
            state = fetch(walk.state)()
            if not (np.isfinite(losses).all() and finite(state)):
                self._hand_out()
                for observer in self.observers:
                    observer.stopped("not_finite", progress)
                before = self.kept.on_device(device)
                raise NotFinite(not_finite.message(self.experiment, before, self.examples, batch, progress, losses[0]))
            progress = progress.after(losses.tolist(), int(rights.sum()), [len(batch)])
            self.kept = Checkpoint(state, progress)
        raise AdtrainError(
            f"a number was not finite in steps {first} to {last}, and all are when these are taken again: "
            f"device {device} does not compute the same twice"
        )
