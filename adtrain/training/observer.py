"""The interface of the observers of a training."""

from __future__ import annotations

from collections.abc import Callable

from adtrain.training.checkpoint import Checkpoint
from adtrain.training.metrics import Epoch, Interval, StopReason
from adtrain.training.progress import Progress
from adtrain.training.step import TrainState


class Observer:
    """Base class of observers of a run. Every method does nothing.

    The state is copied to the host for `checkpoint` only if an observer overrides it.
    """

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        """Epoch `epoch` (from 1) of `epochs` begins, on `images` images: all, or the rest after a resumption."""

    def step_done(self, images: int) -> None:
        """Steps on `images` images have been issued to the device."""

    def interval_done(self, interval: Interval) -> None:
        """The metrics of an interval have been read."""

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> bool | None:
        """An epoch and its validation are over. `state()` is the state on the device, which the next step overwrites.

        Returns True to end the training after this epoch.
        """
        return None

    def checkpoint(self, checkpoint: Checkpoint, best: bool) -> None:
        """A checkpoint to save. All its numbers are finite; `best` marks the best epoch so far."""

    def stopped(self, reason: StopReason, progress: Progress) -> None:
        """The run stops before its end. `reason` is "interrupted" or "not_finite"; `checkpoint` was called before."""
