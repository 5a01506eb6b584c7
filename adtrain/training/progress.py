"""What a training tells while it runs, and to whom."""

from __future__ import annotations

from typing import NamedTuple

from adtrain.training.checkpoint import Checkpoint, Progress
from adtrain.training.evaluation import Score
from adtrain.training.step import TrainState


class Interval(NamedTuple):
    """A few steps, the last of which is number `step` (from 1) of the run; the score is over their images."""

    epoch: int
    step: int
    train: Score
    learning_rate: float
    images_per_second: float


class Epoch(NamedTuple):
    """A pass over the training images; `train` is their score as they were trained on, with changing weights."""

    epoch: int
    step: int
    train: Score
    validation: Score | None
    seconds: float
    images_per_second: float


class Observer:
    """Base of those who follow a run; every method does nothing."""

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        """Epoch number `epoch` (from 1) of `epochs` is about to go through `images` images, all that are left."""

    def step_done(self, images: int) -> None:
        """A step on so many images has been issued."""

    def interval_done(self, interval: Interval) -> None:
        """The metrics of some steps have been read."""

    def epoch_done(self, epoch: Epoch, state: TrainState) -> None:
        """An epoch and its validation are over. The next step consumes `state`: what is kept of it must be copied."""

    def checkpoint(self, checkpoint: Checkpoint, best: bool) -> None:
        """A state to keep, all of whose numbers are finite; `best` says that no epoch before was better."""

    def stopped(self, reason: str, progress: Progress) -> None:
        """The run ends here without being over: "interrupted", or "not_finite". A checkpoint has been handed out."""
