"""The training step of many members at once, and their evaluation: those of one member, by `per_member`.

A member is one training of a sweep. The arrays of all members have a leading axis of members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops
from adtrain.core import tree
from adtrain.core.array import TracedNumber, Value, array
from adtrain.core.staging import Staged, stage
from adtrain.core.trace import scope
from adtrain.core.views import per_member
from adtrain.passes import ALL_BY_MEMBER
from adtrain.training.experiment import TOTALS, Experiment
from adtrain.training.network import Network
from adtrain.training.step import Totals, TrainState, batch_indices, evaluation_step, train_step
from adtrain.training.tasks import Regression, Task


class Tally(NamedTuple):
    """What the steps of an epoch add up, on the device.

    Attributes:
        position: int64 (), the row of the next batch in the order.
        loss: float64 (members,), the sum over the examples.
        sums: (members, ...), the task's sums over the examples.
        finite: int64 (members,), the number of steps of this epoch before the first loss that is not finite.
        steps: int64 (), the number of steps of this epoch.
    """

    position: Value
    loss: Value
    sums: Value
    finite: Value
    steps: Value


class Settings(NamedTuple):
    """What differs between members, beside their states.

    Attributes:
        seeds: uint32 (members, 2), low word first.
        factors: float64 (members, rows), what the schedule gives for each step of an order.
        options: float64 (members,) by the option of the optimizer; of an option that is a list, a list of arrays.
        targets: as `Group.has_own_targets` says, mean and deviation of each member's targets, float64 (members,
            targets); otherwise empty.
    """

    seeds: Value
    factors: Value
    options: Mapping[str, Any]
    targets: Sequence[Value] = ()


SweepStep: TypeAlias = Callable[[TrainState, Tally, Settings, Value, Value, Value], tuple[TrainState, Tally]]
"""(state, tally, settings, images (N, C, H, W), labels (N, ...), order int64 (members, rows, batch), or (rows, batch)
if all members share it) to the state and the tally after a step on the batches in row `tally.position` of the order.
All arrays of the state have a leading axis of members. A staged step donates state and tally."""

DONATED = (0, 1)
"""The donated arguments of a `SweepStep`, by position."""


def sweep_step(experiment: Experiment) -> SweepStep:
    """The step of members that differ in what `Settings` holds, in their weights, and in nothing else.

    The options and the schedule of `experiment` are not used, except options that are 0: see `optim.Optimizer`.
    """

    def step(
        state: TrainState, tally: Tally, settings: Settings, images: Value, labels: Value, order: Value
    ) -> tuple[TrainState, Tally]:
        def member(state: TrainState, tally: Tally, settings: Settings, order: Value) -> Any:
            rows, factor = batch_indices(tally.position, order), batch_indices(tally.position, settings.factors)
            optimizer = experiment.optimizer.with_traced(tree.map(TracedNumber, settings.options))
            network = with_targets(experiment.network, settings.targets)
            parts = replace(experiment.step_parts, network=network, optimizer=optimizer, schedule=lambda _: factor)
            state, metrics = train_step(parts)(state, settings.seeds, images, labels, rows)
            with scope("tally"):
                loss = ops.astype(metrics.loss, np.float64)
                is_finite = ops.equal(loss - loss, 0.0) & ops.equal(tally.finite, tally.steps)
                loss, sums = tally.loss + loss * rows.shape[0], tally.sums + metrics.sums
                return state, loss, sums, tally.finite + ops.astype(is_finite, np.int64)

        axes = 0, Tally._make((None, 0, 0, 0, None)), 0, _members_axis(order)
        state, loss, sums, finite = per_member(member, axes)(state, tally, settings, order)
        with scope("tally"):
            return state, Tally(tally.position + 1, loss, sums, finite, tally.steps + 1)

    return step


def _members_axis(order: Value) -> int | None:
    """The axis of the members in an order (members, rows, batch); None for an order (rows, batch) that they share."""
    return 0 if order.ndim == 3 else None


def with_targets(network: Network, targets: Sequence[Value]) -> Network:
    """The network of a member with these statistics of its targets; the network itself without any."""
    if not targets:
        return network
    assert isinstance(network.task, Regression)
    mean, std = targets
    return replace(network, task=replace(network.task, traced=(mean, std)))


def empty_tally(task: Task, members: int, device: str) -> Tally:
    """The tally before the first step of an epoch."""
    zero = task.zero()
    arrays = np.int64(0), np.zeros(members), np.zeros((members, *zero.shape), zero.dtype), np.zeros(members, np.int64)
    return Tally(*(array(x, device=device) for x in (*arrays, np.int64(0))))


def frozen_states(good: Value, state: TrainState, last: TrainState) -> tuple[Value, TrainState]:
    """After an epoch: `good`, bool (members,), for members that were good and have only finite numbers; and for each
    member `state` if it is good, else `last`. A staged function donates `last`, argument 2."""

    def member(good: Value, state: TrainState, last: TrainState) -> tuple[Value, TrainState]:
        for x in tree.leaves(state):
            if np.issubdtype(x.dtype, np.floating):
                good = good & ops.equal(ops.sum(x - x), 0)
        return good, tree.map(lambda new, old: ops.where(good, new, old), state, last)

    return per_member(member)(good, state, last)


def chosen_states(good: Value, state: TrainState, last: TrainState) -> TrainState:
    """For each member `state` if it is good, else `last`. A staged function donates `state`, argument 1."""
    return per_member(lambda ok, new, old: tree.map(lambda x, y: ops.where(ok, x, y), new, old))(good, state, last)


def sweep_evaluation(network: Network) -> Callable[..., Totals]:
    """The evaluation of a batch for all members: (totals, params, statistics, images, labels, order) to the totals.

    In the totals `loss`, `weight` and `sums` have a leading axis of members.

    `order` is int64 (rows, batch), or (members, rows, batch); rows begin at `totals.position`. A last argument has
    `Settings.targets`.
    """

    def step(
        totals: Totals,
        params: nn.Params,
        statistics: nn.State,
        images: Value,
        labels: Value,
        order: Value,
        targets: Sequence[Value] = (),
    ) -> Totals:
        def member(
            totals: Totals, params: nn.Params, statistics: nn.State, order: Value, targets: Sequence[Value]
        ) -> tuple[Value, ...]:
            evaluate = evaluation_step(with_targets(network, targets))
            return evaluate(totals, params, statistics, images, labels, order)[1:]

        of_all = per_member(member, (Totals._make((None, 0, 0, 0)), 0, 0, _members_axis(order), 0))
        return Totals(totals.position + 1, *of_all(totals, params, statistics, order, targets))

    return step


def sweep_predictions(network: Network) -> Callable[..., Value]:
    """The predictions of all members for a batch: (position, params, statistics, images, order) to (members, N, ...).

    `order` and the last argument are as for `sweep_evaluation`; the batch is in its row `position`.
    """

    def step(
        position: Value,
        params: nn.Params,
        statistics: nn.State,
        images: Value,
        order: Value,
        targets: Sequence[Value] = (),
    ) -> Value:
        def member(params: nn.Params, statistics: nn.State, order: Value, targets: Sequence[Value]) -> Value:
            batch = ops.embedding(batch_indices(position, order), images)
            return with_targets(network, targets).predictions(params, statistics, batch)

        return per_member(member, (0, 0, _members_axis(order), 0))(params, statistics, order, targets)

    return step


class Programs:
    """The staged functions of members of an experiment, which all waves of a group share."""

    def __init__(self, experiment: Experiment) -> None:
        self.step: Staged = stage(sweep_step(experiment), ALL_BY_MEMBER, donate=DONATED)
        self.evaluation: Staged = stage(sweep_evaluation(experiment.network), ALL_BY_MEMBER, donate=TOTALS)
        self.frozen: Staged = stage(frozen_states, ALL_BY_MEMBER, donate={2})
        self.chosen: Staged = stage(chosen_states, ALL_BY_MEMBER, donate={1})
        self.best: Staged = stage(chosen_states, ALL_BY_MEMBER, donate={2})
        self.predictions: Staged = stage(sweep_predictions(experiment.network), ALL_BY_MEMBER)


def zero_member_totals(task: Task, members: int, device: str) -> Totals:
    """The totals before the first batch."""
    tally = empty_tally(task, members, device)
    return Totals(tally.position, tally.loss, array(np.zeros(members), device=device), tally.sums)
