"""The training step and the evaluation of a batch: pure functions that read no value on the host, as staging requires.

Both take a whole data set and the indices of a batch; gathering and normalising the batch are part of the Program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops, optim
from adtrain.augment import Augmentation, Batch, leading_moves, moved
from adtrain.core import tree
from adtrain.core.array import Value, array, from_numpy
from adtrain.core.autodiff import value_and_grad
from adtrain.core.staging import Staged
from adtrain.core.trace import phase, scope
from adtrain.core.types import Shape
from adtrain.training.network import Network
from adtrain.training.tasks import Task


class TrainState(NamedTuple):
    """Everything that a step updates, as trees of arrays: parameters, running statistics, optimizer state."""

    params: nn.Params
    statistics: nn.State
    optimizer: optim.OptState

    @property
    def step(self) -> Value:
        """The number of steps taken: int64, shape ()."""
        step: Value = self.optimizer["step"]
        return step


AVERAGE = "average"
"""The key of the average of the weights in `TrainState.optimizer`, if the config has one."""
POINTS = "points_kept"
"""The key of the points with large residuals in `TrainState.optimizer`, with `data.adaptive`."""
PLATEAU = "plateau"
"""The key of the state of the schedule `plateau` in `TrainState.optimizer`, if it is the config's."""


def averaged(state: TrainState) -> TrainState:
    """The state that is evaluated and saved as the model.

    It has the average of the weights, or the weights that an optimizer with a line search has accepted, where there are
    such.
    """
    if optim.ACCEPTED in state.optimizer:
        return state._replace(params=state.optimizer[optim.ACCEPTED])
    found = state.optimizer.get(AVERAGE)
    return state if found is None else state._replace(params=found["params"], statistics=found["statistics"])


class StepMetrics(NamedTuple):
    """The metrics of a step: mean loss of the batch, shape (), the task's sums, and the learning rate, shape ()."""

    loss: Value
    sums: Value
    learning_rate: Value


class Log(NamedTuple):
    """The metrics of several steps, on the device.

    Attributes:
        position: int64 (), the number of logged steps. It is also the row of the next batch in the order.
        loss, sums, learning_rate: float64 (rows, ...), the metrics of the step at each position.
    """

    position: Value
    loss: Value
    sums: Value
    learning_rate: Value


class Totals(NamedTuple):
    """Sums over the evaluated batches.

    Attributes:
        position: int64 (), the number of batches so far.
        loss, weight: float64 (), the sums of `Network.loss_sums`.
        sums: the task's sums over the images.
    """

    position: Value
    loss: Value
    weight: Value
    sums: Value


TrainStep: TypeAlias = Callable[..., tuple[TrainState, StepMetrics]]
"""(state, seed uint32 (2,), images (N, C, H, W), labels (N, ...), indices int64 (batch,)) to the new state and the
metrics of the batch. A staged step donates its state argument; keep a state with `copied`. With shards it
is a `sharding.ShardedStep`."""

LoggedStep: TypeAlias = Callable[..., tuple[TrainState, Log]]
"""(state, log, seed, images, labels, order int64 (rows, batch)) to the state and the log after a step on the batch in
row `log.position` of the order. It needs nothing from the host, so it can be repeated without interruption."""

EvaluationStep: TypeAlias = Callable[[Totals, nn.Params, nn.State, Value, Value, Value], Totals]
"""(totals, params, statistics, images, labels, order int64 (rows, batch)) to the totals after adding the batch in row
`totals.position` of the order."""


@dataclass(frozen=True)
class StepParts:
    """What a training step consists of.

    Attributes:
        schedule: maps the number of steps so far to a factor on the learning rate.
        clip_value, clip_norm: limits of the gradients, which are clipped by value first, then by norm.
        augmentations: are applied to the batch in their order.
        steps_per_epoch: for augmentations that depend on the epoch.
    """

    network: Network
    optimizer: optim.Optimizer
    schedule: Callable[[Value], Value]
    clip_norm: float | None
    clip_value: float | None
    augmentations: Sequence[Augmentation]
    steps_per_epoch: int
    average: optim.Average | None
    plateau: optim.Plateau | None

    def batch(
        self, images: Value, labels: Value, indices: Value, step: Value, rng: Value, is_empty: bool = False
    ) -> Batch:
        """The augmented batch of the examples `indices` int64 (batch,), or of those that an augmentation draws.

        With `is_empty` it is one image of zeros with the label 0.
        """
        with scope("input"):
            for change in self.augmentations:
                indices = change.examples(indices, images.shape[0], rng)
        if is_empty:
            image, label = (ops.zeros((1, *x.shape[1:]), x.dtype, x.device) for x in (images, labels))
            return Batch(image, label, self.network.unit)
        batch = Batch(*gather_batch(images, labels, indices), self.network.unit)
        if not self.augmentations:
            return batch
        with scope("augment"):
            epoch, dtype = ops.floor_divide(step, self.steps_per_epoch), self.network.dtype
            batch = batch._replace(images=ops.astype(batch.images, dtype), stored=batch.images, epoch=epoch)
            if moves := leading_moves(self.augmentations):
                batch = batch._replace(images=ops.astype(moved(batch, moves, rng, images, indices), dtype))
            for change in self.augmentations[len(moves) :]:
                batch = change(batch, rng)
            return batch

    def learning_rate(self, state: TrainState) -> Value:
        """The learning rate of the next step."""
        factor = self.schedule(state.step)
        if PLATEAU in state.optimizer:
            factor = factor * state.optimizer[PLATEAU]["factor"]
        return factor * self.optimizer.lr

    def completed(self, new: TrainState, before: TrainState, loss: Value, count: int) -> TrainState:
        """The state after a step on `count` examples with this mean loss, with the average and the schedule's state."""
        if self.average is not None:
            with phase("update"), scope("average"):
                params, found = self.average.updated(new.params, new.statistics, before.optimizer[AVERAGE], before.step)
                new = new._replace(params=params, optimizer={**new.optimizer, AVERAGE: found})
        if self.plateau is not None:
            total = ops.astype(loss, np.float64) * count
            with phase("update"), scope("schedule"):
                found = self.plateau.updated(before.optimizer[PLATEAU], total, before.step)
                new = new._replace(optimizer={**new.optimizer, PLATEAU: found})
        return new


def train_step(parts: StepParts) -> TrainStep:
    """A step of gradient descent as a function."""
    network, optimizer = parts.network, parts.optimizer

    def step(
        state: TrainState, seed: Value, images: Value, labels: Value, indices: Value
    ) -> tuple[TrainState, StepMetrics]:
        rng = random_state(seed, state.step)
        mode = nn.Mode(training=True, rng=rng)
        batch = parts.batch(images, labels, indices, state.step, rng)
        if POINTS in state.optimizer:
            batch = batch._replace(kept=state.optimizer[POINTS])

        def loss_of(trained: nn.Params) -> tuple[Value, tuple[Value, nn.State]]:
            params = optimizer.merged(state.params, trained)
            return network.training_loss(params, state.statistics, batch, mode)

        trained = optimizer.trained(state.params)
        (loss, (outputs, statistics)), grads = value_and_grad(loss_of, has_aux=True)(trained)
        with phase("update"), scope("optimizer"):
            if parts.clip_value is not None:
                grads = optim.clip_by_value(grads, parts.clip_value)
            if parts.clip_norm is not None:
                grads, _ = optim.clip_by_norm(grads, parts.clip_norm)
            lr = parts.learning_rate(state)
            with ops.matmul_precision(network.products):
                trained, optimizer_state = optimizer.update(trained, grads, state.optimizer, lr, loss)
        new = TrainState(optimizer.merged(state.params, trained), statistics, optimizer_state)
        new = parts.completed(new, state, loss, indices.shape[0])
        if POINTS in state.optimizer:
            new.optimizer[POINTS] = network.kept_points(outputs, batch, state.step)
        sums = network.training_sums(outputs, batch.labels)
        return new, StepMetrics(optimizer_state.get(optim.LOSS, loss), sums, lr)

    return step


def logged_step(train: TrainStep) -> LoggedStep:
    """The step `train` on the batch at the log's position, with its metrics written to the log.

    `size` is passed on to `train`: nothing, or for a `ShardedStep` the number of examples in the whole batch.
    """

    def step(
        state: TrainState, log: Log, seed: Value, images: Value, labels: Value, order: Value, *size: int
    ) -> tuple[TrainState, Log]:
        state, metrics = train(state, seed, images, labels, batch_indices(log.position, order), *size)
        with scope("log"):
            row = ops.equal(ops.arange(log.loss.shape[0], device=log.loss.device), log.position)
            columns = [
                ops.where(ops.reshape(row, (-1, *(1,) * x.ndim)) if x.ndim else row, ops.astype(x, np.float64), old)
                for x, old in zip(metrics, log[1:], strict=True)
            ]
            return state, Log(log.position + 1, *columns)

    return step


def empty_log(task: Task, rows: int, device: str) -> Log:
    """An empty log for `rows` steps."""
    shapes: list[Shape] = [(), task.zero().shape, ()]
    columns = [array(np.zeros((rows, *shape)), device=device) for shape in shapes]
    return Log(array(np.int64(0), device=device), *columns)


def zero_totals(task: Task, device: str, donated: Totals | None = None) -> Totals:
    """The totals before the first batch, in the memory of totals that are not used afterwards."""
    zeros = np.int64(0), np.float64(0), np.float64(0), task.zero()
    before = (None,) * len(zeros) if donated is None else donated
    return Totals(*(from_numpy(np.asarray(zero), device, old) for zero, old in zip(zeros, before, strict=True)))


def repeated(step: Callable[..., Any], times: int, carry: tuple[Any, ...], *inputs: Any) -> Any:
    """Call `step` `times` times, at least once, and return the last result.

    The first arguments are `carry`, replaced by the result of each call; `inputs` stay the same.
    """
    if isinstance(step, Staged):
        return step.repeat(times, *carry, *inputs)
    for _ in range(times):
        result = step(*carry, *inputs)
        carry = result if len(carry) > 1 else (result,)
    return result


def evaluation_step(network: Network) -> EvaluationStep:
    """The evaluation of a batch as a function: running statistics are used, dropout is off."""

    def step(
        totals: Totals, params: nn.Params, statistics: nn.State, images: Value, labels: Value, order: Value
    ) -> Totals:
        batch, targets = gather_batch(images, labels, batch_indices(totals.position, order))
        loss, weight, sums = network.evaluation_sums(params, statistics, batch, targets)
        return Totals(totals.position + 1, totals.loss + loss, totals.weight + weight, totals.sums + sums)

    return step


def batch_indices(position: Value, order: Value) -> Value:
    """The indices of a batch, int64 (batch,): row `position`, int64 (), of an order, int64 (rows, batch)."""
    with scope("input"):
        return ops.embedding(position, order)


def gather_batch(images: Value, labels: Value, indices: Value) -> tuple[Value, Value]:
    """The batch at `indices` int64 (batch,): images (batch, C, H, W) and labels (batch, ...)."""
    with scope("input"):
        # `ops.take` also handles negative indices, which costs operations; `ops.embedding` does not.
        return ops.embedding(indices, images), ops.embedding(indices, labels)


def all_finite(state: TrainState) -> Value:
    """Whether all numbers of a state are finite, as bool ()."""
    found = [ops.all(ops.isfinite(x)) for x in tree.leaves(state) if x.dtype.kind == "f"]
    return ops.all(ops.stack(found)) if found else ops.all(ops.isfinite(state.step))


def copied(state: TrainState) -> TrainState:
    """A deep copy of a state, to keep it when a staged step donates the original."""
    return tree.map(lambda x: array(x.numpy(), device=x.device), state)


def random_state(seed: Value, step: Value) -> Value:
    """`ops.rng_state` for traced values: seed uint32 (2,), low word first, and step int64 ()."""
    with scope("random"):
        high = ops.astype(ops.astype(step, np.float64) * 2.0**-32, np.uint32)
        words = [ops.astype(step, np.uint32), high]  # the conversion keeps the low 32 bits
        return ops.concatenate([seed, *(ops.reshape(word, (1,)) for word in words)], axis=0)
