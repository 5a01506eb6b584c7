"""How a training ends: with a result, or early, with a checkpoint to continue from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from adtrain.core.errors import AdtrainError
from adtrain.metrics import MetricValue
from adtrain.training.best import Best
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Progress
from adtrain.training.scores import Score
from adtrain.training.step import TrainState

Ending: TypeAlias = Literal["finished", "early_stopping", "callback"]


@dataclass(frozen=True)
class Result:
    """The result of a training that ran to its end.

    Attributes:
        state: the model's state: the best epoch's or the last one's, as `Experiment.restores_best` says.
        restored: whether `state` belongs to an earlier epoch than the last one.
        ended: the reason: "finished", "early_stopping", or "callback" if an observer ended it.
        best: the best epoch, by `training.best_by`.
        train, validation: the scores of the last epoch; `train` is the mean while the weights were changing.
        test: the score of `state` on the test split.
        metrics: those of `training.metrics` on the test split, by name.
        epochs, steps: totals, including those before a resumption.
        images: images trained on since the start or the resumption.
        train_seconds: the sum of `step_seconds`. See `Summary`.
        step_seconds: seconds of each step since then. Steps whose metrics were read together share their mean time,
            from the upload of their indices to the reading of their metrics.
    """

    state: TrainState
    restored: bool
    ended: Ending
    best: Best
    train: Score
    validation: Score | None
    test: Score
    metrics: Mapping[str, MetricValue]
    epochs: int
    steps: int
    images: int
    train_seconds: float
    step_seconds: Sequence[float]


class Interrupted(Exception):
    """The training stopped on request. Its observers have received a checkpoint."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(f"stopped at step {progress.step} (epoch {progress.epoch})")
        self.progress = progress


class NotFinite(AdtrainError):
    """A step produced NaN or infinity. The observers have received a checkpoint of the state before that step."""


def ended(experiment: Experiment, progress: Progress) -> Ending | None:
    """The reason why a training with this progress is over: "finished" or "early_stopping"; None if it is not over."""
    if progress.evaluated and progress.step >= experiment.total_steps:
        return "finished"
    if progress.evaluated and experiment.stops_early(progress.best):
        return "early_stopping"
    return None
