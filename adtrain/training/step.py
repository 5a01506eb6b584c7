"""The training step and the evaluation of a batch: pure functions that read no number, so both can be staged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops, optim
from adtrain.core.array import Value
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


TrainStep: TypeAlias = Callable[[TrainState, Value, Value, Value], tuple[TrainState, StepMetrics]]
"""(state, seed uint32 (2,), images uint8 (N, C, H, W), labels int64 (N,)) to the new state and its metrics."""

EvaluationStep: TypeAlias = Callable[[nn.Params, nn.State, Value, Value], Totals]
"""(params, statistics, images, labels) to the sums over this batch."""


def train_step(
    network: Network,
    optimizer: optim.Optimizer,
    schedule: optim.Schedule,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> TrainStep:
    """One step of gradient descent as a function; gradients are clipped by value first, then by norm."""

    def step(state: TrainState, seed: Value, images: Value, labels: Value) -> tuple[TrainState, StepMetrics]:
        mode = nn.Mode(training=True, rng=random_state(seed, state.step))

        def loss_of(params: nn.Params) -> tuple[Value, tuple[Value, nn.State]]:
            outputs, statistics = network.outputs(params, state.statistics, images, mode)
            return network.loss_of(outputs, labels), (outputs, statistics)

        (loss, (outputs, statistics)), grads = value_and_grad(loss_of, has_aux=True)(state.params)
        with phase("update"), scope("optimizer"):
            if clip_value is not None:
                grads = optim.clip_by_value(grads, clip_value)
            if clip_norm is not None:
                grads, _ = optim.clip_by_norm(grads, clip_norm)
            lr = schedule(state.step) * optimizer.lr
            params, averages = optimizer.update(grads, state.optimizer, state.params, lr)
        return TrainState(params, statistics, averages), StepMetrics(loss, correct(outputs, labels), lr)

    return step


def evaluation_step(network: Network) -> EvaluationStep:
    """The sums of loss and of correct answers over a batch, by the running statistics and without dropout."""

    def step(params: nn.Params, statistics: nn.State, images: Value, labels: Value) -> Totals:
        outputs, _ = network.outputs(params, statistics, images, nn.Mode(training=False))
        loss = ops.astype(network.loss_of(outputs, labels), np.float64) * images.shape[0]
        return Totals(loss, correct(outputs, labels))

    return step


def random_state(seed: Value, step: Value) -> Value:
    """`ops.rng_state` of values: seed as uint32 (2,), low word first, and step as int64 ()."""
    with scope("random"):
        high = ops.astype(ops.astype(step, np.float64) * 2.0**-32, np.uint32)
        words = [ops.astype(step, np.uint32), high]  # the conversion keeps the low 32 bits
        return ops.concatenate([seed, *(ops.reshape(word, (1,)) for word in words)], axis=0)
