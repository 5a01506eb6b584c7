"""Training of a wave: members of a group that are on the device at the same time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from math import prod
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, array, from_numpy
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.core.memory import empty_aligned
from adtrain.curvature import is_of_loss
from adtrain.data import Split
from adtrain.metrics import Metric, MetricValue
from adtrain.sweeps.members import EpochInputs, Group, Member, WaveInputs
from adtrain.sweeps.records import MemberEpoch, OnTest
from adtrain.sweeps.step import Tally, empty_tally, zero_member_totals
from adtrain.training.evaluation import batch_size_of, mean_loss, metrics_of_loss, metrics_on
from adtrain.training.examples import Resident, StepInputs, on_device
from adtrain.training.experiment import LOG_ROWS, Experiment
from adtrain.training.loop import REPORT_SECONDS
from adtrain.training.progress import Best
from adtrain.training.scores import Score, single_numbers
from adtrain.training.step import TrainState, averaged

T = TypeVar("T")
Parts: TypeAlias = Generator[bool, None, T]
"""Yields after each part: True if the next one waits for the device, False if it only starts more work."""


def run_to_end(parts: Parts[T]) -> T:
    """Run all parts of a job; returns its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def side_by_side(jobs: Sequence[Parts[bool]], device: str) -> bool:
    """Run jobs to their ends, and return whether all results are True.

    On a device that runs several Programs at a time, each job has its own stream. A part that waits for the device
    runs when the others have started all they can. On other devices one job runs after the other.
    """
    if len(jobs) == 1:
        return run_to_end(jobs[0])
    with backend(device).side_by_side(len(jobs)) as streams:
        if not streams:
            return all(run_to_end(job) for job in jobs)
        waiting, results = dict.fromkeys(range(len(jobs)), False), []
        while waiting:
            for i in [i for i, waits in waiting.items() if not waits] or list(waiting):
                with streams[i]():
                    try:
                        waiting[i] = next(jobs[i])
                    except StopIteration as end:
                        results.append(end.value)
                        del waiting[i]
        return all(results)


MOST_PREDICTION_BYTES = 2**28
"""The most bytes of predictions that are held for metrics, unless those of one member have more."""


def best_of(experiment: Experiment, epochs: Mapping[int, MemberEpoch], last: int) -> Best:
    """The record of the best epoch of a member after its epochs up to `last`."""
    best = experiment.best_start
    for epoch in sorted(epochs):
        if epoch <= last and epochs[epoch].failed_at is None:
            best = experiment.best_after(best, epochs[epoch])
    return best


@dataclass(frozen=True)
class WaveState:
    """Where the training of a wave is, on the host. All arrays have a leading axis of members.

    Attributes:
        members: the numbers of its members.
        epochs: complete epochs.
        batches: steps of the epoch that is not complete.
        tally: of that epoch; None if there is none.
        last: the state after the last complete epoch, for members that fail in the next one; None without a `tally`.
        frozen: the members that failed. Their state is that after their last epoch with finite numbers.
        best: the state after the best epoch of each member, if the members end with it and have not ended. At the end
            it is in `state`.
    """

    members: tuple[int, ...]
    epochs: int
    batches: int
    state: TrainState
    frozen: tuple[int, ...] = ()
    best: TrainState | None = None
    tally: Tally | None = None
    last: TrainState | None = None

    def only(self, members: Sequence[int]) -> WaveState:
        """The state of some of its members."""
        rows = np.array([self.members.index(number) for number in members], np.int64)
        state, tally, last, best = rows_of((self.state, self.tally, self.last, self.best), rows)
        frozen = tuple(number for number in self.frozen if number in members)
        return WaveState(tuple(members), self.epochs, self.batches, state, frozen, best, tally, last)


def shared(state: TrainState) -> TrainState:
    """The state in the same memory, which a step that donates `state` then leaves as it is."""
    return tree.map(lambda x: Array(x.buffer, x.shape, x.dtype, x.device), state)


def rows_of(values: T, rows: Any) -> T:
    """The rows of some members in a tree of arrays on the host; numbers without an axis of members stay."""
    found: T = tree.map(lambda x: x[rows] if x.ndim else x, values)
    return found


def joined(states: Sequence[WaveState]) -> WaveState:
    """The states of several waves of a group, all after the same epoch, as one."""
    if len(states) == 1:
        return states[0]

    def together(parts: Sequence[TrainState]) -> Any:
        return tree.map(lambda *xs: np.concatenate(xs), *parts)

    state, best = together([x.state for x in states]), [x.best for x in states if x.best is not None]
    members = tuple(number for x in states for number in x.members)
    frozen = tuple(number for x in states for number in x.frozen)
    return replace(states[0], members=members, frozen=frozen, state=state, best=together(best) if best else None)


@dataclass(frozen=True)
class EpochScores:
    """The scores of the members of a wave that had not failed before an epoch."""

    epoch: int
    members: tuple[MemberEpoch, ...]
    seconds: float


class WaveTraining:
    """Trains members of a group together.

    Args:
        history: by number the epochs of each member, which decide which of them are the best.
        metrics: those that are measured beside the scores, by name; default: `Experiment.metrics`.

    Raises AdtrainError where the data do not fit on the device, or an initial state cannot be read.
    """

    def __init__(
        self,
        group: Group,
        members: Sequence[Member],
        device: str,
        start: WaveState | None = None,
        history: Mapping[int, Mapping[int, MemberEpoch]] = {},
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.count = len(members)
        """The number of members. `self.members` may repeat the last one: see `Group.least_members`."""
        if self.count < group.least_members:
            members = [*members, *[members[-1]] * (group.least_members - self.count)]
            start = start and start.only([member.number for member in members])
        frozen = start.frozen if start else ()
        self.good = np.array([member.number not in frozen for member in members])
        """For each member whether its numbers were finite after all epochs so far."""
        self.group, self.members, self.programs, self.device = group, members, group.programs, device
        self.experiment, self.task = group.experiment, group.experiment.network.task
        self.inputs = WaveInputs(group, members, device)
        self.epochs, self.batches = (start.epochs, start.batches) if start else (0, 0)
        self.inputs.prefetch(self.epochs + 1)
        self.metrics = self.experiment.metrics if metrics is None else metrics
        self.bests = [best_of(self.experiment, history.get(x.number, {}), self.epochs) for x in members]
        """The record of the best epoch of each member."""
        self.state = self._uploaded(start.state if start else self._initial_state())
        self.last = self._uploaded(start.last) if start and start.last else shared(self.state)
        """The state after the last complete epoch."""
        ended = start is not None and start.best is None and self.epochs == self.experiment.epochs
        self.best: TrainState | None = None
        """The state after the best epoch of each member, if they end with it and have not ended."""
        if self.experiment.restores_best and not ended:
            self.best = self._uploaded(start.best) if start and start.best else shared(self.state)
        tally = start.tally if start else None
        self.tally = empty_tally(self.task, len(members), device) if tally is None else self._uploaded(tally)
        self.examples = self._resident(group.whole, "training")
        self.steps_per_call = 1

    def _uploaded(self, values: Any) -> Any:
        return tree.map(lambda x: from_numpy(x, self.device), values)

    def _resident(self, split: Split, name: str) -> Resident:
        examples = on_device(split, self.device)
        if not isinstance(examples, Resident):
            raise AdtrainError(
                f"device {self.device}: the {name} images do not fit into its memory, expected a sweep whose data do; "
                "adtrain train streams them"
            )
        return examples

    def _initial_state(self) -> TrainState:
        """The initial states of all members, on the host. Those of one seed are drawn once."""
        count, types = len(self.members), self.experiment.state_types
        state: TrainState = tree.map(lambda x: empty_aligned((count, *x.shape), x.dtype), types)
        rows: dict[tuple[int, str | None], int] = {}
        for i, experiment in enumerate(self.inputs.experiments):
            training = experiment.config.training
            row = rows.setdefault((training.seed, training.init_from), i)
            made = None if row < i else tree.leaves(experiment.initial_numbers(training.init_from))
            for k, of_all in enumerate(tree.leaves(state)):
                of_all[i] = of_all[row] if made is None else made[k]
        return state

    def host_state(self) -> WaveState:
        """The state on the host."""
        kept = (self.tally, self.last) if self.batches else (None, None)
        values = tree.map(lambda x: x.numpy(), (self.state, self.best, *kept))
        state, best, tally, last = rows_of(values, slice(self.count))
        numbers = tuple(member.number for member in self.members[: self.count])
        frozen = tuple(number for number, good in zip(numbers, self.good, strict=False) if not good)
        return WaveState(numbers, self.epochs, self.batches, state, frozen, best, tally, last)

    def epoch_in_parts(self, stop: Callable[[], bool]) -> Parts[EpochScores | None]:
        """Train to the end of the epoch and score, in parts, so that other work can be started between them.

        `stop` is called about every REPORT_SECONDS. The result is None if it returned True.
        """
        started, number = perf_counter(), self.epochs + 1
        sizes, inputs = self._batch_sizes(), self.inputs.epoch(number)
        for batches, size in _runs(sizes[self.batches :]):
            if not (yield from self._take(batches, size, inputs, stop)):
                return None
        yield True
        losses, sums, finite = (x.numpy() for x in (self.tally.loss, self.tally.sums, self.tally.finite))
        trained = np.flatnonzero(self.running[: self.count])
        self._freeze(finite == len(sizes))
        seconds = perf_counter() - started
        self.epochs, self.batches = number, 0
        self.tally = empty_tally(self.task, len(self.members), self.device)
        count = sum(sizes)
        train = self._scores(
            [float(loss) / count for loss in losses], sums, inputs.rows(count), np.asarray(self.group.whole.labels)
        )
        validation, metrics = self._validation_results()
        before = (number - 1) * self.experiment.steps_per_epoch
        found = []
        improved = np.zeros(len(self.members), np.bool_)
        for i in trained.tolist():
            member = self.members[i].number
            if self.good[i]:
                found.append(MemberEpoch(member, number, train[i], validation[i], None, single_numbers(metrics[i])))
                best = self.experiment.best_after(self.bests[i], found[-1])
                improved[i], self.bests[i] = best.epoch == number, best
            else:
                failed_at = before + min(int(finite[i]) + 1, len(sizes))
                found.append(MemberEpoch(member, number, None, None, failed_at))
        if self.best is not None and improved.any():
            self.best = self.programs.best(array(improved, device=self.device), self.state, self.best)
        return EpochScores(number, tuple(found), seconds)

    @property
    def running(self) -> np.ndarray:
        """For each member whether it is trained further: it has not failed, and early stopping has not ended it."""
        stopped = [self.experiment.stops_early(best) for best in self.bests]
        return self.good & ~np.array(stopped)

    def end(self) -> None:
        """After the last epoch, give each member the weights that it ends with."""
        if self.best is not None:
            has_best = array(np.array([best.epoch > 0 for best in self.bests]) & self.good, device=self.device)
            self.state, self.best = self.programs.chosen(has_best, self.best, self.state), None

    def _freeze(self, finite: np.ndarray) -> None:
        """Give members that are not trained further the state after their last epoch with finite numbers.

        Args:
            finite: for each member whether all losses of this epoch are.
        """
        running = self.running
        kept, self.last = self.programs.frozen(array(running & finite, device=self.device), self.state, self.last)
        advanced = kept.numpy()
        self.good = self.good & (advanced | ~running)
        if not advanced.all():
            self.state = self.programs.chosen(kept, self.state, self.last)

    def _batch_sizes(self) -> list[int]:
        """The sizes of the batches of the next epoch; `training.steps` may cut it short."""
        experiment = self.experiment
        count, size = experiment.examples_per_epoch, experiment.config.data.batch_size
        sizes = [min(size, count - first) for first in range(0, count, size)]
        return sizes[: experiment.total_steps - self.epochs * experiment.steps_per_epoch]

    def _take(self, count: int, size: int, of_epoch: EpochInputs, stop: Callable[[], bool]) -> Parts[bool]:
        """Take `count` steps on the next batches, all of `size` examples; False if `stop` ended them."""
        first = self.batches
        inputs = self.examples.batches(of_epoch.order(first, count, size))
        settings = of_epoch.settings(first, count)
        self.tally = self.tally._replace(position=array(np.int64(0), device=self.device))
        while self.batches < first + count:
            times, before = min(self.steps_per_call, first + count - self.batches), perf_counter()
            self.state, self.tally = self.programs.step.repeat(times, self.state, self.tally, settings, *inputs)
            self.steps_per_call = max(1, int(REPORT_SECONDS / max((perf_counter() - before) / times, 1e-9)))
            self.batches += times
            if stop():
                return False
            yield False
        return True

    def _scores(
        self, losses: Sequence[float], sums: np.ndarray, rows: Sequence[np.ndarray], labels: np.ndarray
    ) -> list[Score | None]:
        """The score of each member on its rows of `labels`, from its mean loss and the task's sums."""
        found: list[Score | None] = []
        totals = np.reshape(sums, (len(losses), -1)).astype(np.float64).tolist()
        for loss, of_task, own, x in zip(losses[: self.count], totals, rows, self.inputs.experiments, strict=False):
            finite, labels_of = np.isfinite(loss) and np.isfinite(of_task).all(), partial(labels.__getitem__, own)
            found.append(x.network.task.score(loss, of_task, len(own), labels_of) if finite else None)
        return found

    def _validation_results(self) -> tuple[Sequence[Score | None], Sequence[Mapping[str, MetricValue]]]:
        """The score and the metrics of each member on its validation part."""
        if self.experiment.validation is None:
            return [None] * self.count, [{}] * self.count
        rows = self.inputs.validation_rows()
        return self._evaluated(self.examples, rows), self._measured(self.examples, rows)

    def test_results(self) -> list[OnTest]:
        """The score and the metrics of each member on the test part."""
        test = self._resident(self.experiment.test, "test")
        rows = np.arange(len(test))
        found = zip(self._evaluated(test, rows), self._measured(test, rows), strict=True)
        return [OnTest(score, metrics) for score, metrics in found]

    def _measured(self, examples: Resident, rows: np.ndarray) -> Sequence[Mapping[str, MetricValue]]:
        """The metrics of each member on rows as in `_evaluated`; none for a member with a prediction that is NaN."""
        if not self.metrics:
            return [{}] * self.count
        network, found = self.experiment.network, list[Mapping[str, MetricValue]]()
        held_bytes = rows.shape[-1] * prod(network.model.output_shape(network.input_shape)) * network.dtype.itemsize
        size = min(len(self.members), max(self.group.least_members, MOST_PREDICTION_BYTES // held_bytes))
        evaluated, models = averaged(self.state), None
        if any(map(is_of_loss, self.metrics.values())):
            models = tree.map(lambda x: x.numpy(), (evaluated.params, evaluated.statistics))
        for first in range(0, self.count, size):
            begin = min(first, len(self.members) - size)  # the same number of members in each call
            predictions = self._predictions(examples, rows, slice(begin, begin + size))
            for i in range(first, min(first + size, self.count)):
                of_member, split = predictions[i - begin], examples.split.take(rows if rows.ndim == 1 else rows[i])
                values: dict[str, MetricValue] = {}
                if np.isfinite(of_member).all():
                    values = metrics_on(of_member, split.labels, self.metrics, self.experiment.data.classes)
                    if models is not None:
                        model = self._uploaded(rows_of(models, i))
                        values |= metrics_of_loss((network, *model), split, self.metrics, self.device)
                found.append({name: values[name] for name in self.metrics if name in values})
        return found

    def _predictions(self, examples: Resident, rows: np.ndarray, chosen: slice) -> np.ndarray:
        """The predictions of some members on rows as in `_evaluated`: (members, N, ...)."""
        evaluated = averaged(self.state)
        *state, targets = evaluated.params, evaluated.statistics, self.inputs.targets
        if chosen != slice(0, len(self.members)):
            *state, targets = self._uploaded(tree.map(lambda x: x.numpy()[chosen], (*state, targets)))
        predictions = []
        for steps, (images, _, order) in self._batches(examples, rows if rows.ndim == 1 else rows[chosen]):
            for step in range(steps):
                position = array(np.int64(step), device=self.device)
                predictions.append(self.programs.predictions(position, *state, images, order, targets).numpy())
        return np.concatenate(predictions, axis=1)

    def _batches(self, examples: Resident, rows: np.ndarray) -> Iterator[tuple[int, StepInputs]]:
        """Rows as in `_evaluated` in batches: (count, inputs) of up to LOG_ROWS batches of one size at a time."""
        count, size, begin = rows.shape[-1], batch_size_of(self.task), 0
        for batches, length in _runs([min(size, count - first) for first in range(0, count, size)]):
            part = rows[..., begin : begin + batches * length]
            padded = np.zeros((*part.shape[:-1], LOG_ROWS, length), np.int64)
            padded[..., :batches, :] = part.reshape(*part.shape[:-1], batches, length)
            begin += batches * length
            yield batches, examples.batches(padded)

    def _evaluated(self, examples: Resident, rows: Any) -> list[Score | None]:
        """The score of each member on rows (count,), or (members, count) of its own.

        The batches are those of `Evaluation`, so that the score of a member equals that of its run in all digits.
        """
        totals, state = zero_member_totals(self.task, len(self.members), self.device), averaged(self.state)
        for steps, inputs in self._batches(examples, rows):
            totals = totals._replace(position=array(np.int64(0), device=self.device))
            arguments = state.params, state.statistics, *inputs, self.inputs.targets
            totals = self.programs.evaluation.repeat(steps, totals, *arguments)
        losses = list(map(mean_loss, totals.loss.numpy().tolist(), totals.weight.numpy().tolist()))
        own = rows if rows.ndim == 2 else [rows] * self.count
        return self._scores(losses, totals.sums.numpy(), own, np.asarray(examples.split.labels))


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(batches, size) of runs of consecutive batches of one size, each of up to LOG_ROWS."""
    for size, run in groupby(sizes):
        while batches := len(list(islice(run, LOG_ROWS))):
            yield batches, size
