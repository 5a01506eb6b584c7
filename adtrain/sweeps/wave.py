"""Training of a wave: members of a group that are on the device at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from adtrain import data, optim
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import Staged, stage
from adtrain.core.vmap import vmap
from adtrain.data import Split
from adtrain.passes import ALL
from adtrain.sweeps.members import Group, Member
from adtrain.sweeps.step import (
    DONATED,
    Settings,
    Tally,
    empty_tally,
    sweep_evaluation,
    sweep_step,
    zero_member_totals,
)
from adtrain.training.examples import Resident, on_device
from adtrain.training.experiment import LOG_ROWS, TOTALS
from adtrain.training.loop import REPORT_SECONDS
from adtrain.training.scores import Score
from adtrain.training.step import TrainState


@dataclass(frozen=True)
class WaveState:
    """Where the training of a wave is, on the host. All arrays have a leading axis of members.

    Attributes:
        members: the numbers of its members.
        epochs: complete epochs.
        batches: steps of the epoch that is not complete.
        tally: of that epoch; None if there is none.
    """

    members: tuple[int, ...]
    epochs: int
    batches: int
    state: TrainState
    tally: Tally | None

    def only(self, members: Sequence[int]) -> WaveState:
        """The state of some of its members, between two epochs."""
        rows = np.array([self.members.index(number) for number in members], np.int64)
        return replace(self, members=tuple(members), state=tree.map(lambda x: x[rows], self.state))


def joined(states: Sequence[WaveState]) -> WaveState:
    """The states of several waves of a group, all after the same epoch, as one."""
    if len(states) == 1:
        return states[0]
    state = tree.map(lambda *xs: np.concatenate(xs), *(x.state for x in states))
    return replace(states[0], members=tuple(n for x in states for n in x.members), state=state)


@dataclass(frozen=True)
class EpochScores:
    """The scores of a wave's members after an epoch.

    Attributes:
        finite: for each member the number of steps of this epoch before its first loss that is not finite.
        steps: the steps of this epoch.
        train, validation: a score for each member; None where it is not finite, or if there is no validation part.
    """

    epoch: int
    finite: Sequence[int]
    steps: int
    train: Sequence[Score | None]
    validation: Sequence[Score | None] | None
    seconds: float


class Programs:
    """The staged functions of a group, which its waves share."""

    def __init__(self, group: Group) -> None:
        self.step: Staged = stage(sweep_step(group.experiment), ALL, donate=DONATED)
        self.evaluation: Staged = stage(sweep_evaluation(group.experiment.network), ALL, donate=TOTALS)


class WaveTraining:
    """Trains members of a group together.

    Raises AdtrainError where the data do not fit on the device, or an initial state cannot be read.
    """

    def __init__(
        self,
        group: Group,
        members: Sequence[Member],
        programs: Programs,
        device: str,
        start: WaveState | None = None,
    ) -> None:
        self.group, self.members, self.programs, self.device = group, members, programs, device
        self.experiment, self.task = group.experiment, group.experiment.network.task
        self.data_seeds = [group.data_seed(member) for member in members]
        self.epochs, self.batches = (start.epochs, start.batches) if start else (0, 0)
        self.state = self._uploaded(start.state if start else self._initial_state())
        tally = start.tally if start else None
        self.tally = empty_tally(self.task, len(members), device) if tally is None else self._uploaded(tally)
        self.rows = {seed: group.rows(seed) for seed in dict.fromkeys(self.data_seeds)}
        self.examples = self._resident(group.whole, "training")
        self.steps_per_report = 1

    def _uploaded(self, values: Any) -> Any:
        return tree.map(lambda x: array(x, device=self.device), values)

    def _resident(self, split: Split, name: str) -> Resident:
        examples = on_device(split, self.device)
        if not isinstance(examples, Resident):
            raise AdtrainError(
                f"device {self.device}: the {name} images do not fit into its memory, expected a sweep whose data do; "
                "adtrain train streams them"
            )
        return examples

    def _initial_state(self) -> TrainState:
        """The initial states of all members, on the host. Members of one seed share the numbers, not the memory."""
        made: dict[tuple[int, str | None], TrainState] = {}
        keys = []
        for member in self.members:
            key = member.config.training.seed, member.config.training.init_from
            keys.append(key)
            if key not in made:
                made[key] = tree.map(lambda x: x.numpy(), self.group.of_member(member).initial_state("cpu"))
        return tree.map(lambda *xs: np.stack(xs), *(made[key] for key in keys))

    def host_state(self) -> WaveState:
        """The state on the host."""
        state, tally = (tree.map(lambda x: x.numpy(), x) for x in (self.state, self.tally))
        numbers = tuple(member.number for member in self.members)
        return WaveState(numbers, self.epochs, self.batches, state, tally if self.batches else None)

    def epoch(self, stop: Callable[[], bool], report: Callable[[int], object]) -> EpochScores | None:
        """Train to the end of the epoch and score; None if `stop` returned True before.

        `stop` is called about every REPORT_SECONDS, and `report` with the number of examples of each call.
        """
        started, number = perf_counter(), self.epochs + 1
        sizes = self._batch_sizes()
        while self.batches < len(sizes):
            for batches in self._groups(sizes[self.batches :]):
                if not self._take(batches, sizes, stop, report):
                    return None
        losses, sums, finite = (x.numpy() for x in (self.tally.loss, self.tally.sums, self.tally.finite))
        count = sum(sizes)
        steps = int(self.tally.steps.numpy())
        seconds = perf_counter() - started
        self.epochs, self.batches = number, 0
        self.tally = empty_tally(self.task, len(self.members), self.device)
        return EpochScores(
            number, finite.tolist(), steps, self._scores(losses, sums, count), self._validation_scores(), seconds
        )

    def _batch_sizes(self) -> list[int]:
        """The sizes of the batches of the next epoch; `training.steps` may cut it short."""
        experiment = self.experiment
        count, size = len(experiment.train), experiment.config.data.batch_size
        sizes = [min(size, count - first) for first in range(0, count, size)]
        return sizes[: experiment.total_steps - self.epochs * experiment.steps_per_epoch]

    def _groups(self, sizes: Sequence[int]) -> Iterator[int]:
        """Divide the batches into numbers of consecutive ones of one size, at most LOG_ROWS."""
        count = 0
        for i, size in enumerate(sizes, 1):
            count += 1
            if count == LOG_ROWS or i == len(sizes) or sizes[i] != size:
                yield count
                count = 0

    def _take(
        self, count: int, sizes: Sequence[int], stop: Callable[[], bool], report: Callable[[int], object]
    ) -> bool:
        """Take `count` steps on the next batches, of one size; False if `stop` ended them."""
        first, size = self.batches, sizes[self.batches]
        inputs = self.examples.batches(self._order(first, count, size))
        settings = self._settings(first, count)
        self.tally = self.tally._replace(position=array(np.int64(0), device=self.device))
        while self.batches < first + count:
            times, before = min(self.steps_per_report, first + count - self.batches), perf_counter()
            self.state, self.tally = self.programs.step.repeat(times, self.state, self.tally, settings, *inputs)
            self.steps_per_report = max(1, int(REPORT_SECONDS / max((perf_counter() - before) / times, 1e-9)))
            self.batches += times
            report(times * size * len(self.members))
            if stop():
                return False
        return True

    def _order(self, first: int, count: int, size: int) -> np.ndarray:
        """The order of `count` batches from batch `first` of the epoch: (LOG_ROWS, members, size), or without members
        if they share it."""
        begin = first * self.experiment.config.data.batch_size
        batches = {seed: order[begin : begin + count * size].reshape(count, size) for seed, order in self._orders.items()}
        if self.group.shared_seed is not None:
            order = np.zeros((LOG_ROWS, size), np.int64)
            order[:count] = batches[self.group.shared_seed]
            return order
        order = np.zeros((LOG_ROWS, len(self.members), size), np.int64)
        for i, seed in enumerate(self.data_seeds):
            order[:count, i] = batches[seed]
        return order

    @property
    def _orders(self) -> Mapping[int, np.ndarray]:
        """The rows of the epoch in order, by seed."""
        epoch = self.epochs + 1
        if getattr(self, "_orders_of", None) != epoch:
            size = len(self.experiment.train)
            # One batch of all examples is the permutation that smaller batches divide.
            self._made = {
                seed: rows[0][next(data.batches(size, size, seed, epoch))] for seed, rows in self.rows.items()
            }
            self._orders_of = epoch
        return self._made

    def _settings(self, first: int, count: int) -> Settings:
        """The settings for `count` steps from batch `first` of the epoch."""
        factors = self._factors
        rates = np.zeros((LOG_ROWS, len(self.members)))
        for i, (schedule, lr) in enumerate(zip(self._schedules, self._rates, strict=True)):
            rates[:count, i] = factors[schedule][first : first + count] * lr
        return Settings(self._seeds, array(rates, device=self.device), self._options)

    @cached_property
    def _seeds(self) -> Any:
        words = [[seed & 0xFFFFFFFF, seed >> 32] for seed in (member.config.training.seed for member in self.members)]
        return array(np.array(words, np.uint32), device=self.device)

    @cached_property
    def _optimizers(self) -> list[optim.Optimizer]:
        return [self.group.of_member(member).optimizer for member in self.members]

    @cached_property
    def _rates(self) -> list[float]:
        return [optimizer.lr for optimizer in self._optimizers]

    @cached_property
    def _options(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in self.group.options:
            values = [getattr(optimizer, name) for optimizer in self._optimizers]
            if isinstance(values[0], tuple):
                found[name] = [array(np.array(x, np.float64), device=self.device) for x in zip(*values, strict=True)]
            else:
                found[name] = array(np.array(values, np.float64), device=self.device)
        return found

    @cached_property
    def _distinct_schedules(self) -> list[optim.Schedule]:
        found: list[optim.Schedule] = []
        self._schedule_numbers = []
        for member in self.members:
            schedule = self.group.of_member(member).schedule
            if schedule not in found:
                found.append(schedule)
            self._schedule_numbers.append(found.index(schedule))
        return found

    @property
    def _schedules(self) -> Sequence[int]:
        """For each member the number of its schedule among the distinct ones."""
        _ = self._distinct_schedules
        return self._schedule_numbers

    @property
    def _factors(self) -> Sequence[np.ndarray]:
        """For each distinct schedule the factors of all steps of this epoch."""
        if getattr(self, "_factors_of", None) != self.epochs:
            per_epoch = self.experiment.steps_per_epoch
            steps = array(np.arange(per_epoch, dtype=np.int64) + self.epochs * per_epoch)
            self._made_factors = [vmap(schedule)(steps).numpy() for schedule in self._distinct_schedules]
            self._factors_of = self.epochs
        return self._made_factors

    def _scores(self, losses: np.ndarray, sums: np.ndarray, count: int) -> list[Score | None]:
        rows = np.reshape(sums, (len(losses), -1)).astype(np.float64).tolist()
        return [
            self.task.score(float(loss) / count, row, count) if np.isfinite(loss) and np.isfinite(row).all() else None
            for loss, row in zip(losses, rows, strict=True)
        ]

    def _validation_scores(self) -> list[Score | None] | None:
        if self.experiment.validation is None:
            return None
        rows = {seed: found[1] for seed, found in self.rows.items()}
        if len(rows) == 1:
            (shared,) = rows.values()
            return self._evaluated(self.examples, shared)
        return self._evaluated(self.examples, np.stack([rows[seed] for seed in self.data_seeds]))

    def test_scores(self) -> list[Score | None]:
        """The scores on the test part."""
        test = self.experiment.test
        return self._evaluated(self._resident(test, "test"), np.arange(len(test)))

    def _evaluated(self, examples: Resident, rows: Any) -> list[Score | None]:
        """The score of each member on rows (count,), or (members, count) of its own."""
        totals = zero_member_totals(self.task, len(self.members), self.device)
        count, size = rows.shape[-1], self.experiment.full_batch
        for length, begin, end in _chunks(count, size):
            part = rows[..., begin:end]
            order = np.moveaxis(part.reshape(*part.shape[:-1], -1, length), -2, 0)
            padded = np.zeros((LOG_ROWS, *order.shape[1:]), np.int64)
            padded[: len(order)] = order
            totals = totals._replace(position=array(np.int64(0), device=self.device))
            inputs = self.state.params, self.state.statistics, *examples.batches(padded)
            totals = self.programs.evaluation.repeat(len(order), totals, *inputs)
        return self._scores(totals.loss.numpy(), totals.sums.numpy(), count)


def _chunks(count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(length of a batch, first row, end) of up to LOG_ROWS batches of one size at a time."""
    whole = count // size * size
    for begin in range(0, whole, LOG_ROWS * size):
        yield size, begin, min(begin + LOG_ROWS * size, whole)
    if whole < count:
        yield count - whole, whole, count
