"""Runs a training from any step to its end: observers, epochs, evaluation, checkpoints, and how a training ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np

from adtrain.core import communicator
from adtrain.core.backend import Executable
from adtrain.core.errors import AdtrainError, OutOfMemory
from adtrain.core.timeline import during, report_status
from adtrain.data import DataError, Split
from adtrain.metrics import MetricValue
from adtrain.optim import STOPPED
from adtrain.training import scores
from adtrain.training.checkpoint import Checkpoint, fetch
from adtrain.training.checks import warn_of_init_from
from adtrain.training.costs import too_large
from adtrain.training.evaluation import Evaluation, named_metrics
from adtrain.training.examples import on_device
from adtrain.training.experiment import LOG_ROWS, Experiment, placeholders
from adtrain.training.loop import FiniteCheck, StepLoop, any_rank, batches_of, not_finite_message, of_first_rank
from adtrain.training.progress import Best, Epoch, Interval, Progress, StopReason, Validated
from adtrain.training.scores import Score
from adtrain.training.step import TrainState, averaged
from adtrain.training.tasks import host_sums

Ending: TypeAlias = Literal["finished", "early_stopping", "line_search", "callback"]


@dataclass(frozen=True)
class Result:
    """The result of a training that ran to its end.

    Attributes:
        state: the model's state: the best epoch's or the last one's, as `Experiment.restores_best` says.
        restored: whether `state` belongs to an earlier epoch than the last one.
        ended: the reason: "finished", "early_stopping", "line_search" if the optimizer has stopped, or "callback" if an
            observer ended it.
        best: the best epoch, by `training.best_by`.
        train, validation: the scores of the last epoch; `train` is the mean while the weights were changing.
        test: the score of `state` on the test split.
        metrics: those of `training.metrics` on the test split, by name.
        epochs, steps: totals, including those before a resumption.
        images: images trained on since the start or the resumption.
        train_seconds: the sum of `step_seconds`. See `Summary`.
        step_seconds: seconds of each step since then. Steps whose metrics were read together share their mean time,
            from the upload of their indices to the reading of their metrics.
    """

    state: TrainState
    restored: bool
    ended: Ending
    best: Best
    train: Score
    validation: Score | None
    test: Score
    metrics: Mapping[str, MetricValue]
    epochs: int
    steps: int
    images: int
    train_seconds: float
    step_seconds: Sequence[float]


class Interrupted(Exception):
    """The training stopped on request. Its observers have received a checkpoint."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(f"stopped at step {progress.step} (epoch {progress.epoch})")
        self.progress = progress


class NotFinite(AdtrainError):
    """A step produced NaN or infinity. The observers have received a checkpoint of the state before that step."""


def ended(experiment: Experiment, progress: Progress) -> Ending | None:
    """The reason why a training with this progress is over; None if it is not over."""
    if progress.evaluated and progress.step >= experiment.total_steps:
        return "finished"
    if progress.evaluated and experiment.stops_early(progress.best):
        return "early_stopping"
    if progress.evaluated and progress.stopped:
        return "line_search"
    return None


class Observer:
    """Base class of observers of a run. Every method does nothing.

    The state is copied to the host for `checkpoint` only if an observer overrides it.
    """

    def training_started(self, experiment: Experiment) -> None:
        """The training of `experiment` begins, or continues."""

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        """Epoch `epoch` (from 1) of `epochs` begins, on `images` images: all, or the rest after a resumption."""

    def step_done(self, images: int) -> None:
        """Steps on `images` images have been issued to the device."""

    def interval_done(self, interval: Interval) -> None:
        """The metrics of an interval have been read."""

    def validated(self, validated: Validated) -> None:
        """The validation examples have been evaluated within an epoch."""

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> bool | None:
        """An epoch and its validation are over. `state()` is the state that was evaluated, on the device; the next step
        overwrites it.

        Returns True to end the training after this epoch.
        """
        return None

    def checkpoint(self, checkpoint: Checkpoint, best: bool) -> None:
        """A checkpoint to save. All its numbers are finite; `best` marks the best epoch so far."""

    def stopped(self, reason: StopReason, progress: Progress) -> None:
        """The run stops before its end. `reason` is "interrupted" or "not_finite"; `checkpoint` was called before."""


LONG_PREPARATION = 0.1
"""A network is large if its step takes at least this number of seconds to trace and lower."""

CHECK_SECONDS = 1.0
"""The approximate time between two checks that all numbers of the state are finite."""

COPY_SHARE = 0.02
"""The largest part of the time for copies of the state that no checkpoint needs. Training returns to the last copy if a
number is not finite."""


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
) -> Result:
    """Train from the initial state, or from `start`, to the last step, and evaluate.

    `stop` is called every REPORT_SECONDS.

    Raises:
        Interrupted: `stop` returned True.
        DataError: a data file was changed while it was read; the observers have received a checkpoint.
        OutOfMemory: the step does not fit on the device; names a batch size that fits.
        NotFinite: the loss or a number of the state is not finite; names the step, the operation and its layer.
    """
    try:
        return _Training(experiment, device, observers, start, stop).run()
    except OutOfMemory as error:
        raise too_large(experiment, device) or error from None


class _StateCheck(NamedTuple):
    """The check of a state, and the copy of it, which have begun. The functions wait for them."""

    finite: Callable[[], bool]
    copy: Callable[[], TrainState] | None


class _PendingMetrics(NamedTuple):
    """An interval of steps whose metrics are being copied to the host."""

    columns: Sequence[Callable[[], np.ndarray]]  # losses, the task's sums, learning rates
    row: int  # the first step's row in the columns
    batches: Sequence[np.ndarray]  # of indices
    check: _StateCheck | None  # of the state after it
    last: bool  # whether no step follows before the state after it is checked
    save: bool  # whether to write a checkpoint of that state


class _Training:
    def __init__(
        self,
        experiment: Experiment,
        device: str,
        observers: Sequence[Observer],
        start: Start | None,
        stop: Callable[[], bool],
    ) -> None:
        self.experiment, self.device, self.observers = experiment, device, observers
        self.task = experiment.network.task
        self.finite = FiniteCheck(experiment, device)
        self.saves = any_rank(any(type(x).checkpoint is not Observer.checkpoint for x in observers))
        self.stop = lambda: any_rank(stop())
        self.examples = on_device(experiment.train, device, experiment.draws_examples)
        self.loop = StepLoop(experiment, placeholders(experiment.divided_types, device), self.examples)
        self.is_large = False  # until the time of its preparation is known
        if start is None:
            if communicator.current().rank == 0:
                warn_of_init_from(experiment)
            with ThreadPoolExecutor(1, "weights") as background:
                initial = background.submit(experiment.initial_numbers, experiment.config.training.init_from)
                begun = perf_counter()
                self.loop.compile([experiment.full_batch])
                self.is_large = perf_counter() - begun >= LONG_PREPARATION
            progress = Progress.start(experiment.best_start, self.task)
            self.last_good = self._divided(Checkpoint(initial.result(), progress))
        else:
            self.last_good = self._divided(start.checkpoint)
        self.loop.state = self.last_good.on_device(device)
        self.restores_best = experiment.restores_best
        best = start.best if start is not None and self.restores_best else None
        self.best_checkpoint = None if best is None else self._divided(best)
        self.progress = self.last_good.progress
        self.evaluations: dict[str, Evaluation] = {}
        self.later: list[Callable[[], object]] = []
        """What begins to compile after the first steps have been issued."""
        self.ended_by_observer: Ending | None = None
        self.step_seconds: list[float] = []
        self.images = 0
        self.copied_at = self.checked_at = self.read_at = perf_counter()
        self.copy_seconds = 0.0
        self.epoch_starts: list[Progress] = []
        """The progress at the start of each epoch since `last_good`."""

    def _divided(self, checkpoint: Checkpoint) -> Checkpoint:
        return Checkpoint(self.experiment.divided(checkpoint.state), checkpoint.progress)

    def run(self) -> Result:
        for observer in self.observers:
            observer.training_started(self.experiment)
        while (reason := ended(self.experiment, self.progress) or self.ended_by_observer) is None:
            try:
                self._epoch()
            except DataError:  # a file changed while it was in use
                self._publish(self.last_good)
                raise
        progress, state = self.progress, self.loop.state
        if restored := self.best_checkpoint is not None and self.best_checkpoint.progress.step != progress.step:
            state = self.best_checkpoint.on_device(self.device)
        assert progress.train is not None, "training ends only after an evaluation"
        return Result(
            state=self.experiment.with_params(averaged(state)),
            restored=restored,
            ended=reason,
            best=progress.best,
            train=progress.train,
            validation=progress.validation,
            test=self._score(state, "test"),
            metrics=self._metrics(state, self.experiment.test),
            epochs=progress.epochs_done,
            steps=progress.step,
            images=self.images,
            train_seconds=sum(self.step_seconds),
            step_seconds=self.step_seconds,
        )

    def _epoch(self) -> None:
        """Train on the rest of the epoch, or up to the run's last step, and evaluate."""
        progress, first = self.progress, len(self.step_seconds)
        batches = list(batches_of(self.experiment, progress.epoch))[progress.batches :]
        batches = batches[: self.experiment.total_steps - progress.step]
        images = sum(map(len, batches))
        for observer in self.observers:
            observer.epoch_started(progress.epoch, self.experiment.epochs, images)
        self.loop.begin(batches)
        self._compile(sorted(set(map(len, batches)), reverse=True))
        with during("training"):
            self._steps(batches)
        validation = self.experiment.validation
        score, metrics = None, {}
        if validation is not None:
            score = self._score(self.loop.state, "validation")
            metrics = scores.single_numbers(self._metrics(self.loop.state, validation))
        self._finish_epoch(score, metrics, images, sum(self.step_seconds[first:]))

    def _compile(self, sizes: Sequence[int]) -> None:
        """Compile the step for these sizes, the first of which is the next step's, and what evaluates.

        All of it is lowered while kernels compile. On one GPU the steps of a large network begin as soon as the kernels
        of the first size are compiled. What is not lowered by then is lowered while the GPU takes the first steps.
        """
        if not self.step_seconds:
            report_status("preparing the step")
        first, others = self.loop.compile(sizes[:1]), list[Executable]()
        rest: list[Callable[[], object]] = [lambda: others.extend(self.loop.compile(sizes[1:]))]
        if self.device == "gpu" and self.experiment.sharding is None and not self.step_seconds:
            rest += self._begin_compiling_evaluation, lambda: self.finite.begin_compiling(self.loop.state)
        begins_early = self.is_large and self.device == "gpu" and communicator.current().size == 1
        while rest and not (begins_early and all(each.ready for each in first)):
            rest.pop(0)()
        self.later = rest
        for executable in first if begins_early else (*first, *others):
            executable.finish()

    def _begin_compiling_evaluation(self) -> None:
        """Begin to compile what evaluates after the epoch."""
        evaluated = averaged(self.loop.state)
        name = "test" if self.experiment.validation is None else "validation"
        self._evaluation(name).begin_compiling(evaluated.params, evaluated.statistics)

    def _steps(self, batches: Sequence[np.ndarray]) -> None:
        """Take the loop's steps, one for each of these batches. The state after them is finite.

        The metrics of an interval are read after the next steps have been issued, so that a GPU is never idle.
        """
        report_status("")
        self.read_at = perf_counter()
        stopping, pending = False, None
        for first, end, save, validate in self._intervals(len(batches)):
            done, row = first, self.loop.row
            for steps, images in self.loop.steps(end - first):
                done += steps
                for observer in self.observers:
                    observer.step_done(images)
                if self.later:
                    self.later.pop(0)()
                if pending is not None:
                    self._finish_interval(pending)
                    pending = None
                if stopping := self.stop():
                    break
            last = stopping or validate or end == len(batches)
            pending = self._fetch_metrics(row, batches[first:done], last, save and not stopping)
            if stopping:
                break
            if validate:
                self._finish_interval(pending)
                pending = None
                score = self._score(self.loop.state, "validation")
                for observer in self.observers:
                    observer.validated(Validated(self.progress.epoch, self.progress.step, score))
                self.read_at = perf_counter()
        if pending is not None:
            self._finish_interval(pending)
        if stopping:
            self._interrupt()

    def _intervals(self, count: int) -> Iterator[tuple[int, int, bool, bool]]:
        """Divide the next `count` batches into intervals: (first, end, whether to write a checkpoint at the end, and
        whether to evaluate the validation examples there)."""
        training, before = self.experiment.config.training, self.progress.step
        first = 0
        for end in range(1, count + 1):
            save, validate = (
                every is not None and (before + end) % every == 0
                for every in (training.checkpoint_every, training.validate_every)
            )
            if save or validate or end == count or end % LOG_ROWS == 0:
                yield first, end, save and end < count, validate and end < count
                first = end

    def _fetch_metrics(self, row: int, batches: Sequence[np.ndarray], last: bool, save: bool) -> _PendingMetrics:
        """Start to copy the metrics of an interval, logged from `row` on, and to check the state if that is due."""
        columns = [x.fetch() for x in self.loop.log[1:]]
        due = of_first_rank(perf_counter() - self.checked_at >= CHECK_SECONDS)
        check = None
        if not last and (save or due):
            check = self._begin_check(save)
        return _PendingMetrics(columns, row, batches, check, last, save)

    def _begin_check(self, save: bool) -> _StateCheck:
        """Start to check the state, and to copy it to `save` it, or if the last copy was long enough ago."""
        self.checked_at = perf_counter()
        finite = self.finite(self.loop.state)
        copy_due = of_first_rank((self.checked_at - self.copied_at) * COPY_SHARE >= self.copy_seconds)
        return _StateCheck(finite, self._fetch_state() if save or copy_due else None)

    def _fetch_state(self) -> Callable[[], TrainState]:
        """Start to copy the state to the host; the function that is returned waits for it."""
        begun = perf_counter()
        found = fetch(self.loop.state)
        begin_seconds = perf_counter() - begun

        def wait() -> TrainState:
            begun = perf_counter()
            state = found()
            self.copied_at = perf_counter()
            self.copy_seconds = begin_seconds + self.copied_at - begun
            return state

        return wait

    def _finish_interval(self, pending: _PendingMetrics) -> None:
        """Wait for the metrics of an interval, check them, and report the interval.

        The time of its steps ends when their metrics arrive. The check and the copy of the state follow.
        """
        sizes = list(map(len, pending.batches))
        images = sum(sizes)
        losses, sums, rates = (wait()[pending.row :][: len(sizes)] for wait in pending.columns)
        now = perf_counter()
        with during("checkpoint"):
            check = self._begin_check(pending.save) if pending.last else pending.check
            is_finite = (check is None or check.finite()) and bool(np.isfinite(losses).all())
            state = None if check is None or check.copy is None or not is_finite else check.copy()
        if not is_finite:
            self._locate_not_finite(self.progress.step + len(sizes))
        self.progress = self.progress.after(losses.tolist(), host_sums(sums), sizes)
        seconds, self.read_at = now - self.read_at, now
        self.step_seconds += [seconds / len(sizes)] * len(sizes)
        self.images += images
        loss, totals = float(np.dot(losses, sizes)) / images, np.atleast_1d(sums.sum(axis=0)).tolist()
        score = self.task.score(loss, totals, images, lambda: self._labels(pending.batches))
        rate = self.experiment.optimizer.rate_at(self.progress.step - 1, float(rates[-1]))
        interval = Interval(self.progress.epoch, self.progress.step, score, rate, images / seconds)
        for observer in self.observers:
            observer.interval_done(interval)
        if state is not None:
            self._keep(state)
            if pending.save:
                self._publish(self.last_good)

    def _labels(self, batches: Sequence[np.ndarray]) -> np.ndarray:
        """The labels of the training examples in these batches."""
        return self.experiment.train.labels[np.concatenate(batches)]

    def _finish_epoch(self, validation: Score | None, metrics: dict[str, float], images: int, seconds: float) -> None:
        progress = self.progress
        train = progress.score(
            self.task,
            lambda: self._labels(list(islice(batches_of(self.experiment, progress.epoch), progress.batches))),
        )
        speed = images / seconds if seconds else 0.0
        done = Epoch(progress.epoch, progress.step, train, validation, seconds, speed, metrics)
        best = self.experiment.best_after(progress.best, done)
        is_best = (best.epoch, best.value) != (progress.best.epoch, progress.best.value)
        stopped = self.loop.state.optimizer.get(STOPPED)
        self.progress = progress.after_evaluation(
            best, train, validation, self.experiment.steps_per_epoch, stopped is not None and bool(stopped.item())
        )
        if self.last_good.progress.step == self.progress.step:
            self._keep(self.last_good.state)
        else:
            self.epoch_starts.append(self.progress)
        if is_best and self.restores_best:
            self.best_checkpoint = self._current()
        for observer in self.observers:
            if observer.epoch_done(done, lambda: self.experiment.with_params(averaged(self.loop.state))):
                self.ended_by_observer = "callback"
        if self.saves:
            self._publish(self._current(), is_best)

    def _score(self, state: TrainState, name: str) -> Score:
        def check_stop() -> None:
            if self.stop():
                self._interrupt()

        report_status(f"evaluating the {name} {self.experiment.config.data.examples}")
        with during("evaluation"):
            evaluated = averaged(state)
            return self._evaluation(name).score(evaluated.params, evaluated.statistics, check_stop)

    def _evaluation(self, name: str) -> Evaluation:
        """The evaluation on the validation or test examples."""
        if name not in self.evaluations:
            experiment = self.experiment
            split = experiment.validation if name == "validation" else experiment.test
            assert split is not None
            examples = on_device(split, self.device)
            self.evaluations[name] = Evaluation(
                experiment.evaluation_step, self.task, examples, name, experiment.sharding
            )
        return self.evaluations[name]

    def _metrics(self, state: TrainState, split: Split) -> dict[str, MetricValue]:
        experiment = self.experiment
        if not experiment.metrics:
            return {}
        evaluated = experiment.with_params(averaged(state))
        trained = experiment.network, evaluated.params, evaluated.statistics
        return named_metrics(trained, experiment.metrics, experiment.data.classes, split, self.device)

    def _keep(self, state: TrainState) -> None:
        """Let `last_good` be this copy of the state at the present progress."""
        self.last_good = Checkpoint(state, self.progress)
        self.epoch_starts.clear()

    def _current(self) -> Checkpoint:
        """The state at the present progress, which is finite; `last_good` from here on."""
        if self.last_good.progress.step != self.progress.step:
            with during("checkpoint"):
                self._keep(self._fetch_state()())
        return self.last_good

    def _publish(self, checkpoint: Checkpoint, is_best: bool = False) -> None:
        if self.saves:
            checkpoint = Checkpoint(self.experiment.whole(checkpoint.state), checkpoint.progress)
            for observer in self.observers:
                observer.checkpoint(checkpoint, is_best)

    def _interrupt(self) -> NoReturn:
        self._publish(self._current())
        for observer in self.observers:
            observer.stopped("interrupted", self.last_good.progress)
        raise Interrupted(self.last_good.progress)

    def _locate_not_finite(self, last: int) -> NoReturn:
        """Repeat the steps from `last_good` to number `last`, and raise NotFinite for the first one that overflows.

        Steps are deterministic to the bit, so the repetition overflows in the same step as before.
        """
        device, first = self.device, self.last_good.progress.step + 1
        loop = StepLoop(self.experiment, self.last_good.on_device(device), self.examples)
        for progress in (self.last_good.progress, *self.epoch_starts):
            batches = list(batches_of(self.experiment, progress.epoch))[progress.batches :][: last - progress.step]
            self.last_good = Checkpoint(self.last_good.state, progress)
            loop.begin(batches)
            for batch in batches:
                row = loop.row
                for _ in loop.steps(1):
                    losses, sums, _ = (x.numpy()[row : row + 1] for x in loop.log[1:])
                if not (self.finite(loop.state)() and np.isfinite(losses).all()):
                    self._publish(self.last_good)
                    for observer in self.observers:
                        observer.stopped("not_finite", progress)
                    before = self.last_good.on_device(device)
                    raise NotFinite(
                        not_finite_message(self.experiment, before, self.examples, batch, progress, losses[0])
                    )
                progress = progress.after(losses.tolist(), host_sums(sums), [len(batch)])
                self.last_good = Checkpoint(fetch(loop.state)(), progress)
        raise AdtrainError(
            f"steps {first} to {last} produced NaN or infinity, but their repetition did not: "
            f"device {device} is not deterministic"
        )
