"""How a training ends: with a result, or before its end with a checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adtrain.core.errors import AdtrainError
from adtrain.training.best import Best
from adtrain.training.checkpoint import Progress
from adtrain.training.evaluation import Score
from adtrain.training.experiment import Experiment
from adtrain.training.step import TrainState


@dataclass(frozen=True)
class Result:
    """A training that is over.

    Attributes:
        state: of the model: with `training.early_stopping` the best epoch's, else the last one's.
        restored: whether that is not the last one's.
        ended: why: "finished", or "early_stopping".
        best: the best epoch, by `training.best_by`.
        train, validation: the scores of the last epoch; `train` as it was while the epoch ran.
        test: the model's score.
        epochs, steps: in all.
        images, train_seconds: trained on since the start or the resumption, and the time in the loop over batches;
            evaluation is not in it.
        step_seconds: for each step since then the mean over the steps whose metrics were read together, from their
            indices on the host to that reading.
    """

    state: TrainState
    restored: bool
    ended: str
    best: Best
    train: Score
    validation: Score | None
    test: Score
    epochs: int
    steps: int
    images: int
    train_seconds: float
    step_seconds: Sequence[float]


class Interrupted(Exception):
    """A training was asked to stop, and has handed out a checkpoint."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(f"stopped at step {progress.step} (epoch {progress.epoch})")
        self.progress = progress


class NotFinite(AdtrainError):
    """A training met a number that is not finite, and has handed out a checkpoint of the state before that step."""


def ended(experiment: Experiment, progress: Progress) -> str | None:
    """Why a training that has come so far has nothing left to do: "finished", "early_stopping", or None."""
    stopping = experiment.config.training.early_stopping
    if progress.evaluated and progress.step >= experiment.total_steps:
        return "finished"
    if progress.evaluated and stopping is not None and progress.best.waited >= stopping.patience:
        return "early_stopping"
    return None
