"""The events of a training, and the interface of those that observe it."""

from __future__ import annotations

from typing import NamedTuple

from adtrain.training.checkpoint import Checkpoint, Progress
from adtrain.training.evaluation import Score
from adtrain.training.step import TrainState


class Interval(NamedTuple):
    """Consecutive steps whose metrics were read together; `step` (from 1) is the last one, `train` their score."""

    epoch: int
    step: int
    train: Score
    learning_rate: float
    images_per_second: float


class Epoch(NamedTuple):
    """A pass over the training images; `train` is the mean score during the pass, while the weights were changing."""

    epoch: int
    step: int
    train: Score
    validation: Score | None
    seconds: float
    images_per_second: float


class Observer:
    """Base class of observers of a run. Every method does nothing."""

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        """Epoch `epoch` (from 1) of `epochs` begins, on `images` images: all, or the rest after a resumption."""

    def step_done(self, images: int) -> None:
        """Steps on `images` images have been issued to the device."""

    def interval_done(self, interval: Interval) -> None:
        """The metrics of an interval have been read."""

    def epoch_done(self, epoch: Epoch, state: TrainState) -> None:
        """An epoch and its validation are over. The next step overwrites `state`, so an observer must copy it."""

    def checkpoint(self, checkpoint: Checkpoint, best: bool) -> None:
        """A checkpoint to save. All its numbers are finite; `best` marks the best epoch so far."""

    def stopped(self, reason: str, progress: Progress) -> None:
        """The run stops before its end. `reason` is "interrupted" or "not_finite"; `checkpoint` was called before."""
