"""The training step and the evaluation of a batch: pure functions that read no number, so both can be staged.

Both take a whole data set and the indices of a batch, so that gathering and normalising it are part of the Program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops, optim
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.autodiff import value_and_grad
from adtrain.core.scope import phase, scope
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


class Totals(NamedTuple):
    """Sums over evaluated images, each of shape ()."""

    loss: Value
    correct: Value


TrainStep: TypeAlias = Callable[[TrainState, Value, Value, Value, Value], tuple[TrainState, StepMetrics]]
"""(state, seed uint32 (2,), images uint8 (N, C, H, W), labels int64 (N,), indices int64 (batch,)) to the new state and
the metrics of the batch. A staged step consumes the state that it is given: see `copied`."""

EvaluationStep: TypeAlias = Callable[[nn.Params, nn.State, Value, Value, Value], Totals]
"""(params, statistics, images, labels, indices) to the sums over the batch at `indices`."""


def train_step(
    network: Network,
    optimizer: optim.Optimizer,
    schedule: optim.Schedule,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> TrainStep:
    """One step of gradient descent as a function; gradients are clipped by value first, then by norm."""

    def step(
        state: TrainState, seed: Value, images: Value, labels: Value, indices: Value
    ) -> tuple[TrainState, StepMetrics]:
        mode = nn.Mode(training=True, rng=random_state(seed, state.step))
        batch, targets = gathered(images, labels, indices)

        def loss_of(params: nn.Params) -> tuple[Value, tuple[Value, nn.State]]:
            outputs, statistics = network.outputs(params, state.statistics, batch, mode)
            return network.loss_of(outputs, targets), (outputs, statistics)

        (loss, (outputs, statistics)), grads = value_and_grad(loss_of, has_aux=True)(state.params)
        with phase("update"), scope("optimizer"):
            if clip_value is not None:
                grads = optim.clip_by_value(grads, clip_value)
            if clip_norm is not None:
                grads, _ = optim.clip_by_norm(grads, clip_norm)
            lr = schedule(state.step) * optimizer.lr
            params, averages = optimizer.update(grads, state.optimizer, state.params, lr)
        return TrainState(params, statistics, averages), StepMetrics(loss, correct(outputs, targets), lr)

    return step


def evaluation_step(network: Network) -> EvaluationStep:
    """The sums of loss and of correct answers over a batch, by the running statistics and without dropout."""

    def step(params: nn.Params, statistics: nn.State, images: Value, labels: Value, indices: Value) -> Totals:
        batch, targets = gathered(images, labels, indices)
        outputs, _ = network.outputs(params, statistics, batch, nn.Mode(training=False))
        loss = ops.astype(network.loss_of(outputs, targets), np.float64) * indices.shape[0]
        return Totals(loss, correct(outputs, targets))

    return step


def gathered(images: Value, labels: Value, indices: Value) -> tuple[Value, Value]:
    """The batch at `indices` int64 (batch,): images (batch, C, H, W) and labels (batch,)."""
    with scope("input"):
        # Rows by index are what an embedding is; `take` would first look for indices that count from the end.
        return ops.embedding(indices, images), ops.embedding(indices, labels)


def copied(state: TrainState) -> TrainState:
    """The same numbers, each array in memory of its own: for who keeps a state while a staged step consumes it."""
    return tree.map(lambda x: array(x.numpy(), device=x.device), state)


def random_state(seed: Value, step: Value) -> Value:
    """`ops.rng_state` of values: seed as uint32 (2,), low word first, and step as int64 ()."""
    with scope("random"):
        high = ops.astype(ops.astype(step, np.float64) * 2.0**-32, np.uint32)
        words = [ops.astype(step, np.uint32), high]  # the conversion keeps the low 32 bits
        return ops.concatenate([seed, *(ops.reshape(word, (1,)) for word in words)], axis=0)
