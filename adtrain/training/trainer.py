"""Runs a training from any step to its end: epochs, evaluation, checkpoints, and the conditions to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import NamedTuple, NoReturn

import numpy as np

from adtrain.core import communicator
from adtrain.core.errors import AdtrainError, OutOfMemory
from adtrain.core.status import report_status
from adtrain.core.timeline import during
from adtrain.data import DataError, Split
from adtrain.metrics import MetricValue
from adtrain.training import agreement, not_finite, scores
from adtrain.training.checkpoint import Checkpoint, fetch, finite
from adtrain.training.checks import warn_of_init_from
from adtrain.training.endings import Ending, Interrupted, NotFinite, Result, ended
from adtrain.training.evaluation import begin_compiling, evaluate, named_metrics
from adtrain.training.examples import on_device
from adtrain.training.experiment import LOG_ROWS, Experiment
from adtrain.training.loop import StepLoop, batches_of
from adtrain.training.memory import too_large
from adtrain.training.metrics import Epoch, Interval
from adtrain.training.observer import Observer
from adtrain.training.progress import Progress
from adtrain.training.scores import Score
from adtrain.training.step import TrainState
from adtrain.training.tasks import host_sums

COPY_SECONDS = 1.0
"""The approximate time between two copies of the state, to which training can return if a number is not finite."""


class Start(NamedTuple):
    """Where a training continues: a checkpoint, and the checkpoint of the best epoch so far, if there is one."""

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

    `stop` is called every REPORT_SECONDS. With `every_step_checked`, NaN and infinity are found one step after they
    arise instead of about one second after; then the state is read after each step, which is slow.

    Raises:
        Interrupted: `stop` returned True.
        DataError: a data file was changed while it was read; the observers have received a checkpoint.
        OutOfMemory: the step does not fit on the device; names a batch size that fits.
        NotFinite: the loss or a number of the state is not finite; names the step, the operation and its layer.
    """
    try:
        return _Training(experiment, device, observers, start, stop, every_step_checked).run()
    except OutOfMemory as error:
        raise too_large(experiment, device) or error from None


class _PendingMetrics(NamedTuple):
    """An interval of steps whose metrics are being copied to the host, and with them the state after it, or None."""

    columns: Sequence[Callable[[], np.ndarray]]  # losses, the task's sums, learning rates
    row: int  # the first step's row in the columns
    batches: Sequence[np.ndarray]  # of indices
    state: Callable[[], TrainState] | None
    save: bool  # whether to write a checkpoint of the state


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
        self.task = experiment.network.task
        self.stop, self.every_step_checked = lambda: agreement.any_rank(stop()), every_step_checked
        if start is None:
            if communicator.current().rank == 0:
                warn_of_init_from(experiment)
            initial = fetch(experiment.initial_state("cpu"))()
            self.last_good = self._divided(Checkpoint(initial, Progress.start(experiment.best_start, self.task)))
        else:
            self.last_good = self._divided(start.checkpoint)
        state = self.last_good.on_device(device)
        self.restores_best = experiment.restores_best
        best = start.best if start is not None and self.restores_best else None
        self.best_checkpoint = None if best is None else self._divided(best)
        self.progress = self.last_good.progress
        self.examples = on_device(experiment.train, device)
        self.loop = self._step_loop(state, ())
        self.ended_by_observer: Ending | None = None
        self.step_seconds: list[float] = []
        self.images = 0
        self.copied_at = self.read_at = perf_counter()

    def _divided(self, checkpoint: Checkpoint) -> Checkpoint:
        return Checkpoint(self.experiment.divided(checkpoint.state), checkpoint.progress)

    def run(self) -> Result:
        while (reason := ended(self.experiment, self.progress) or self.ended_by_observer) is None:
            try:
                self._epoch()
            except DataError:  # a file changed while it was in use
                self._publish_checkpoint()
                raise
        progress, state = self.progress, self.loop.state
        if restored := self.best_checkpoint is not None and self.best_checkpoint.progress.step != progress.step:
            state = self.best_checkpoint.on_device(self.device)
        assert progress.train is not None, "training ends only after an evaluation"
        return Result(
            state=self.experiment.with_params(state),
            restored=restored,
            ended=reason,
            best=progress.best,
            train=progress.train,
            validation=progress.validation,
            test=self._score(state, self.experiment.test, "test"),
            metrics=self._metrics(state, self.experiment.test),
            epochs=progress.epochs_done,
            steps=progress.step,
            images=self.images,
            train_seconds=sum(self.step_seconds),
            step_seconds=self.step_seconds,
        )

    def _step_loop(self, state: TrainState, batches: Sequence[np.ndarray]) -> StepLoop:
        return StepLoop(self.experiment, state, self.examples, batches)

    def _epoch(self) -> None:
        """Train on the rest of the epoch, or up to the run's last step, and evaluate."""
        progress, first = self.progress, len(self.step_seconds)
        batches = list(batches_of(self.experiment, progress.epoch))[progress.batches :]
        batches = batches[: self.experiment.total_steps - progress.step]
        images = sum(map(len, batches))
        for observer in self.observers:
            observer.epoch_started(progress.epoch, self.experiment.epochs, images)
        self.loop = self._step_loop(self.loop.state, batches)
        self._compile(sorted(set(map(len, batches)), reverse=True))
        with during("training"):
            self._steps(batches)
        validation = self.experiment.validation
        score, metrics = None, {}
        if validation is not None:
            score = self._score(self.loop.state, validation, "validation")
            metrics = scores.single_numbers(self._metrics(self.loop.state, validation))
        self._finish_epoch(score, metrics, images, sum(self.step_seconds[first:]))

    def _compile(self, sizes: Sequence[int]) -> None:
        """Compile the step for these sizes. What evaluates is compiled meanwhile, and while the steps run."""
        if not self.step_seconds:
            report_status("preparing the step")
        compiled = self.loop.compile(sizes)
        state, experiment = self.loop.state, self.experiment
        if self.device == "gpu" and experiment.sharding is None and not self.step_seconds:
            examples = on_device(experiment.validation or experiment.test, self.device)
            begin_compiling(experiment.evaluation_step, self.task, state.params, state.statistics, examples)
        for executable in compiled:
            executable.finish()

    def _steps(self, batches: Sequence[np.ndarray]) -> None:
        """Take the loop's steps, one for each of these batches. Then `last_good` is the state after them.

        The metrics of an interval are read after the next steps have been issued, so that a GPU is never idle.
        """
        self.read_at = perf_counter()
        stopping, pending = False, None
        for first, end, save in self._intervals(len(batches)):
            done, row = first, self.loop.row
            for steps, images in self.loop.steps(end - first):
                done += steps
                for observer in self.observers:
                    observer.step_done(images)
                if pending is not None:
                    self._finish_interval(pending)
                    pending = None
                if stopping := self.stop():
                    break
            with_state = stopping or save or end == len(batches)
            pending = self._fetch_metrics(row, batches[first:done], with_state, save)
            if stopping:
                break
        if pending is not None:
            self._finish_interval(pending)
        if stopping:
            self._interrupt()

    def _intervals(self, count: int) -> Iterator[tuple[int, int, bool]]:
        """Divide the next `count` batches into intervals: (first, end, whether to write a checkpoint at the end)."""
        every, progress = self.experiment.config.training.checkpoint_every, self.progress
        rows, first = 1 if self.every_step_checked else LOG_ROWS, 0
        for end in range(1, count + 1):
            due = every is not None and (progress.step + end) % every == 0
            if due or end == count or end % rows == 0:
                yield first, end, due and end < count
                first = end

    def _fetch_metrics(self, row: int, batches: Sequence[np.ndarray], with_state: bool, save: bool) -> _PendingMetrics:
        """Start to copy the metrics of an interval, logged from `row` on, and with them the state if it is due."""
        due = agreement.of_first_rank(perf_counter() - self.copied_at >= COPY_SECONDS)
        if with_state := with_state or self.every_step_checked or bool(due):
            self.copied_at = perf_counter()
        columns = [x.fetch() for x in self.loop.log[1:]]
        return _PendingMetrics(columns, row, batches, fetch(self.loop.state) if with_state else None, save)

    def _finish_interval(self, pending: _PendingMetrics) -> None:
        """Wait for the metrics and the state of an interval, check them, and report the interval.

        The time of its steps ends when their metrics arrive. The copy and the check of the state follow.
        """
        sizes = list(map(len, pending.batches))
        images = sum(sizes)
        losses, sums, rates = (wait()[pending.row :][: len(sizes)] for wait in pending.columns)
        now = perf_counter()
        with during("checkpoint"):
            state = None if pending.state is None else pending.state()
            is_finite = bool(np.isfinite(losses).all()) and (state is None or self._finite(state))
        if not is_finite:
            self._locate_not_finite(self.progress.step + len(sizes))
        self.progress = self.progress.after(losses.tolist(), host_sums(sums), sizes)
        seconds, self.read_at = now - self.read_at, now
        self.step_seconds += [seconds / len(sizes)] * len(sizes)
        self.images += images
        loss, totals = float(np.dot(losses, sizes)) / images, np.atleast_1d(sums.sum(axis=0)).tolist()
        score = self.task.score(loss, totals, images, lambda: self._labels(pending.batches))
        interval = Interval(self.progress.epoch, self.progress.step, score, float(rates[-1]), images / seconds)
        for observer in self.observers:
            observer.interval_done(interval)
        if state is not None:
            self.last_good = Checkpoint(state, self.progress)
            if pending.save:
                self._publish_checkpoint()

    def _labels(self, batches: Sequence[np.ndarray]) -> np.ndarray:
        """The labels of the training examples in these batches."""
        return self.experiment.train.labels[np.concatenate(batches)]

    def _finish_epoch(self, validation: Score | None, metrics: dict[str, float], images: int, seconds: float) -> None:
        progress, stopping = self.progress, self.experiment.config.training.early_stopping
        train = progress.score(
            self.task,
            lambda: self._labels(list(islice(batches_of(self.experiment, progress.epoch), progress.batches))),
        )
        min_delta = stopping.min_delta if stopping else 0.0
        best = progress.best.after(progress.epoch, train, validation, metrics, min_delta)
        speed = images / seconds if seconds else 0.0
        done = Epoch(progress.epoch, progress.step, train, validation, seconds, speed, metrics)
        is_best = (best.epoch, best.value) != (progress.best.epoch, progress.best.value)
        self.progress = progress.after_evaluation(best, train, validation, self.experiment.steps_per_epoch)
        self.last_good = Checkpoint(self.last_good.state, self.progress)
        if is_best and self.restores_best:
            self.best_checkpoint = self.last_good
        state = self.experiment.with_params(self.loop.state)
        for observer in self.observers:
            if observer.epoch_done(done, state):
                self.ended_by_observer = "callback"
        self._publish_checkpoint(is_best)

    def _score(self, state: TrainState, split: Split, name: str) -> Score:
        def check_stop() -> None:
            if self.stop():
                self._interrupt()

        step = self.experiment.evaluation_step
        with during("evaluation"):
            examples = on_device(split, self.device)
            return evaluate(
                step, self.task, state.params, state.statistics, examples, name, check_stop, self.experiment.sharding
            )

    def _metrics(self, state: TrainState, split: Split) -> dict[str, MetricValue]:
        experiment = self.experiment
        if not experiment.metrics:
            return {}
        trained = experiment.network, experiment.with_params(state).params, state.statistics
        return named_metrics(trained, experiment.metrics, experiment.data.classes, split, self.device)

    def _finite(self, state: TrainState) -> bool:
        """Whether the parts of the state on all ranks contain only finite numbers."""
        return not agreement.any_rank(not finite(self.experiment.without_padding(state)))

    def _publish_checkpoint(self, is_best: bool = False) -> None:
        checkpoint = Checkpoint(self.experiment.whole(self.last_good.state), self.last_good.progress)
        for observer in self.observers:
            observer.checkpoint(checkpoint, is_best)

    def _interrupt(self) -> NoReturn:
        self._publish_checkpoint()
        for observer in self.observers:
            observer.stopped("interrupted", self.last_good.progress)
        raise Interrupted(self.last_good.progress)

    def _locate_not_finite(self, last: int) -> NoReturn:
        """Repeat the steps from `last_good` to number `last`, and raise NotFinite for the first one that overflows.

        Steps are deterministic to the bit, so the repetition overflows in the same step as before.
        """
        device, progress = self.device, self.last_good.progress
        first = progress.step + 1
        batches = list(batches_of(self.experiment, progress.epoch))[progress.batches :][: last - progress.step]
        loop = self._step_loop(self.last_good.on_device(device), batches)
        for batch in batches:
            row = loop.row
            for _ in loop.steps(1):
                losses, sums, _ = (x.numpy()[row : row + 1] for x in loop.log[1:])
            state = fetch(loop.state)()
            if not (np.isfinite(losses).all() and self._finite(state)):
                self._publish_checkpoint()
                for observer in self.observers:
                    observer.stopped("not_finite", progress)
                before = self.last_good.on_device(device)
                raise NotFinite(not_finite.message(self.experiment, before, self.examples, batch, progress, losses[0]))
            progress = progress.after(losses.tolist(), host_sums(sums), [len(batch)])
            self.last_good = Checkpoint(state, progress)
        raise AdtrainError(
            f"steps {first} to {last} produced NaN or infinity, but their repetition did not: "
            f"device {device} is not deterministic"
        )
