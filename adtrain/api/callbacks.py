"""Callbacks: functions of the user that see the metrics of each epoch, and may end the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError
from adtrain.training import Epoch, Interval, Observer, TrainState

Metrics: TypeAlias = dict[str, float]
"""The metrics of an epoch: epoch, step, train_loss and train_accuracy (or train_rmse and others, as `Score` has them),
the same and those of `training.metrics` with validation_ (if there are validation images), learning_rate (of the last
step), seconds, and images_per_second."""

SPLITS = ("train", "validation")


class Callback(Protocol):
    """An object that is called after each epoch."""

    def on_epoch(self, metrics: Metrics) -> bool | None:
        """Called with the metrics of an epoch. Returns True to end the training, otherwise False or None."""
        ...


class EpochMetrics(Observer):
    """Collects the metrics of all epochs in `rows`, and passes those of each epoch to the callbacks."""

    def __init__(self, callbacks: Sequence[Callback | Callable[[Metrics], bool | None]]) -> None:
        self.callbacks = [_function(callback) for callback in callbacks]
        self.rows: list[Metrics] = []
        self.learning_rate = float("nan")

    def interval_done(self, interval: Interval) -> None:
        self.learning_rate = interval.learning_rate

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> bool:
        row: Metrics = {"epoch": epoch.epoch, "step": epoch.step}
        for split in SPLITS:
            score = plain(getattr(epoch, split)) or {}
            row |= {f"{split}_{name}": value for name, value in score.items()}
        row |= {f"validation_{name}": value for name, value in epoch.metrics.items()}
        row |= {"learning_rate": self.learning_rate, "seconds": epoch.seconds}
        row["images_per_second"] = epoch.images_per_second
        self.rows.append(row)
        answers = [_answer(callback(dict(row))) for callback in self.callbacks]
        return any(answers)


def _function(callback: Any) -> Callable[[Metrics], Any]:
    found = getattr(callback, "on_epoch", callback)
    if not callable(found):
        kind = type(callback).__name__
        raise AdtrainError(f"train: found a callback of type {kind}, expected a function, or an object with on_epoch")
    function: Callable[[Metrics], Any] = found
    return function


def _answer(value: Any) -> bool:
    if value is None or isinstance(value, (bool, np.bool_)):
        return bool(value)
    kind = type(value).__name__
    raise AdtrainError(f"train: a callback returned a {kind}, expected True to end the training, or None")
