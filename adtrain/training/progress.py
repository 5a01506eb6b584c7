"""The position of a run in its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from adtrain.config.records import otherwise
from adtrain.config.values import Bool, Measured, Total
from adtrain.option_types import Size
from adtrain.training.best import LOST, Best
from adtrain.training.scores import Score
from adtrain.training.tasks import Labels, Task


@dataclass(frozen=True)
class Progress:
    """The position of a run in its training.

    Attributes:
        best: the best epoch so far.
        epoch: the number of the current epoch, from 1; between two epochs, the number of the next one.
        step: steps taken in total.
        batches: steps taken in this epoch.
        loss, sums, images: the sum of the losses, the task's sums, and the number of images, of this epoch so far.
        evaluated: whether the weights have been evaluated since the last step.
        train, validation: the scores of the last evaluated epoch.
    """

    best: Annotated[Best, otherwise(LOST)]
    epoch: Size
    step: Total
    batches: Total
    loss: Measured
    sums: tuple[Measured, ...]
    images: Total
    evaluated: Bool
    train: Score | None
    validation: Score | None

    @classmethod
    def start(cls, best: Best, task: Task) -> Progress:
        """The progress before the first step; `best` is the record before the first epoch."""
        return cls(
            best=best, epoch=1, step=0, batches=0, loss=0.0, sums=(0.0,) * task.zero().size, images=0,
            evaluated=True, train=None, validation=None,
        )  # fmt: skip

    @property
    def epochs_done(self) -> int:
        """Epochs trained on, including one that is only partly done."""
        return self.epoch - (self.batches == 0)

    def after(self, losses: Sequence[float], sums: Sequence[Sequence[float]], sizes: Sequence[int]) -> Progress:
        """The progress after more steps, from the mean loss, the task's sums and the size of each step's batch."""
        loss, total = self.loss, self.sums
        for x, more, size in zip(losses, sums, sizes, strict=True):
            loss += x * size  # one step at a time: the rounding must not depend on where a run was stopped
            total = tuple(a + b for a, b in zip(total, more, strict=True))
        return replace(
            self,
            step=self.step + len(sizes),
            batches=self.batches + len(sizes),
            loss=loss,
            sums=total,
            images=self.images + sum(sizes),
            evaluated=False,
        )

    def after_evaluation(self, best: Best, train: Score, validation: Score | None, steps_per_epoch: int) -> Progress:
        """The progress after an evaluation with these scores. It moves to the next epoch if this one is complete."""
        updated = replace(self, best=best, evaluated=True, train=train, validation=validation)
        if self.batches < steps_per_epoch:
            return updated
        return replace(updated, epoch=self.epoch + 1, batches=0, loss=0.0, sums=(0.0,) * len(self.sums), images=0)

    def score(self, task: Task, labels: Labels) -> Score:
        """The score over the images of this epoch so far, which have these labels."""
        return task.score(self.loss / self.images, self.sums, self.images, labels)
