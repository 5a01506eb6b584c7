"""The training step and the evaluation of a batch: pure functions that read no number, so both can be staged.

Both take a whole data set and the indices of a batch, so that gathering and normalising it are part of the Program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops, optim
from adtrain.augment import Augmentation, Batch
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.autodiff import value_and_grad
from adtrain.core.scope import phase, scope
from adtrain.core.staging import Staged
from adtrain.training.network import Network, correct


class TrainState(NamedTuple):
    """All that a step changes, as trees of arrays: parameters, running statistics, the optimizer's averages."""

    params: nn.Params
    statistics: nn.State
    optimizer: optim.OptState

    @property
    def step(self) -> Value:
        """The number of steps taken: int64, shape ()."""
        step: Value = self.optimizer["step"]
        return step


class StepMetrics(NamedTuple):
    """What a step says of itself, each of shape (): the batch's mean loss, its count of correct answers, the rate."""

    loss: Value
    correct: Value
    learning_rate: Value


class Log(NamedTuple):
    """What steps leave on the device until somebody reads it.

    Attributes:
        position: int64 (), the number of steps logged, and so the row of the next batch in the order they go by.
        loss, correct, learning_rate: float64 (rows,), the metrics of each step at its position.
    """

    position: Value
    loss: Value
    correct: Value
    learning_rate: Value


class Totals(NamedTuple):
    """Sums over evaluated images: the number of batches so far, the loss and the correct answers, each of shape ()."""

    position: Value
    loss: Value
    correct: Value


TrainStep: TypeAlias = Callable[[TrainState, Value, Value, Value, Value], tuple[TrainState, StepMetrics]]
"""(state, seed uint32 (2,), images uint8 (N, C, H, W), labels int64 (N,), indices int64 (batch,)) to the new state and
the metrics of the batch. A staged step consumes the state that it is given: see `copied`."""

LoggedStep: TypeAlias = Callable[[TrainState, Log, Value, Value, Value, Value], tuple[TrainState, Log]]
"""(state, log, seed, images, labels, order int64 (rows, batch)) to the state and the log after a step on the batch at
the log's position in the order. It asks nothing of the host, so that any number of steps can follow one another."""

EvaluationStep: TypeAlias = Callable[[Totals, nn.Params, nn.State, Value, Value, Value], Totals]
"""(totals, params, statistics, images, labels, order int64 (rows, batch)) to the totals with those of the batch at
their position in the order."""


def train_step(
    network: Network,
    optimizer: optim.Optimizer,
    schedule: optim.Schedule,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    augmentations: Sequence[Augmentation] = (),
) -> TrainStep:
    """One step of gradient descent as a function, on batches that the augmentations have changed, one after the other.

    Gradients are clipped by value first, then by norm.
    """

    def step(
        state: TrainState, seed: Value, images: Value, labels: Value, indices: Value
    ) -> tuple[TrainState, StepMetrics]:
        rng = random_state(seed, state.step)
        mode = nn.Mode(training=True, rng=rng)
        batch = Batch(*gathered(images, labels, indices), network.unit)
        if augmentations:
            batch = augmented(batch, augmentations, rng, network.dtype)

        def loss_of(params: nn.Params) -> tuple[Value, tuple[Value, nn.State]]:
            outputs, statistics = network.outputs(params, state.statistics, batch.images, mode)
            return network.loss_of(outputs, batch.labels, batch.mixed), (outputs, statistics)

        (loss, (outputs, statistics)), grads = value_and_grad(loss_of, has_aux=True)(state.params)
        with phase("update"), scope("optimizer"):
            if clip_value is not None:
                grads = optim.clip_by_value(grads, clip_value)
            if clip_norm is not None:
                grads, _ = optim.clip_by_norm(grads, clip_norm)
            lr = schedule(state.step) * optimizer.lr
            params, averages = optimizer.update(grads, state.optimizer, state.params, lr)
        return TrainState(params, statistics, averages), StepMetrics(loss, correct(outputs, batch.labels), lr)

    return step


def logged_step(train: TrainStep) -> LoggedStep:
    """The step `train` on one batch of an order after the other."""

    def step(
        state: TrainState, log: Log, seed: Value, images: Value, labels: Value, order: Value
    ) -> tuple[TrainState, Log]:
        state, metrics = train(state, seed, images, labels, batch_at(log.position, order))
        with scope("log"):
            here = ops.equal(ops.arange(log.loss.shape[0], device=log.loss.device), log.position)
            logged = [ops.where(here, ops.astype(x, np.float64), old) for x, old in zip(metrics, log[1:], strict=True)]
            return state, Log(log.position + 1, *logged)

    return step


def empty_log(rows: int, device: str) -> Log:
    """A log for at most `rows` steps."""
    columns = [array(np.zeros(rows), device=device) for _ in range(3)]
    return Log(array(np.int64(0), device=device), *columns)


def no_totals(device: str) -> Totals:
    """The totals before the first batch."""
    return Totals(*(array(zero, device=device) for zero in (np.int64(0), np.float64(0), np.int64(0))))


def repeated(step: Callable[..., Any], times: int, carried: tuple[Any, ...], *given: Any) -> Any:
    """What so many calls in a row make of the arguments `carried`, which each call returns anew."""
    if isinstance(step, Staged):
        return step.repeat(times, *carried, *given)
    for _ in range(times):
        found = step(*carried, *given)
        carried = found if len(carried) > 1 else (found,)
    return found


def evaluation_step(network: Network) -> EvaluationStep:
    """The sums of loss and of correct answers, by the running statistics and without dropout."""

    def step(
        totals: Totals, params: nn.Params, statistics: nn.State, images: Value, labels: Value, order: Value
    ) -> Totals:
        batch, targets = gathered(images, labels, batch_at(totals.position, order))
        outputs, _ = network.outputs(params, statistics, batch, nn.Mode(training=False))
        loss = ops.astype(network.loss_of(outputs, targets), np.float64) * order.shape[1]
        return Totals(totals.position + 1, totals.loss + loss, totals.correct + correct(outputs, targets))

    return step


def batch_at(position: Value, order: Value) -> Value:
    """Row `position`, int64 (), of an order int64 (rows, batch): the indices of a batch, int64 (batch,)."""
    with scope("input"):
        return ops.embedding(position, order)


def gathered(images: Value, labels: Value, indices: Value) -> tuple[Value, Value]:
    """The batch at `indices` int64 (batch,): images (batch, C, H, W) and labels (batch,)."""
    with scope("input"):
        # Rows by index are what an embedding is; `take` would first look for indices that count from the end.
        return ops.embedding(indices, images), ops.embedding(indices, labels)


def augmented(batch: Batch, augmentations: Sequence[Augmentation], rng: Value, dtype: np.dtype[Any]) -> Batch:
    """The batch after each of the augmentations in turn, its images as numbers of `dtype`."""
    with scope("augment"):
        batch = batch._replace(images=ops.astype(batch.images, dtype))
        for change in augmentations:
            batch = change(batch, rng)
        return batch


def copied(state: TrainState) -> TrainState:
    """The same numbers, each array in memory of its own: for who keeps a state while a staged step consumes it."""
    return tree.map(lambda x: array(x.numpy(), device=x.device), state)


def random_state(seed: Value, step: Value) -> Value:
    """`ops.rng_state` of values: seed as uint32 (2,), low word first, and step as int64 ()."""
    with scope("random"):
        high = ops.astype(ops.astype(step, np.float64) * 2.0**-32, np.uint32)
        words = [ops.astype(step, np.uint32), high]  # the conversion keeps the low 32 bits
        return ops.concatenate([seed, *(ops.reshape(word, (1,)) for word in words)], axis=0)
