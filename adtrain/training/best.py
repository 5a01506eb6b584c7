"""Tracks the best epoch so far, and how many epochs have passed without an improvement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from adtrain.config.values import BestBy, Bool, Measured, Total
from adtrain.training.scores import Score


class ScoredEpoch(Protocol):
    """A record of an epoch, of a run or of a member of a sweep. `metrics` are those of the validation part."""

    @property
    def epoch(self) -> int: ...
    @property
    def train(self) -> Score | None: ...
    @property
    def validation(self) -> Score | None: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Best:
    """The best epoch by the metric `by`, such as validation_accuracy.

    Attributes:
        higher: whether higher values are better.
        value, epoch: the best value and its epoch; None and 0 before the first epoch ends.
        to_beat: the reference of early stopping: the last value that improved on its predecessor by more than
            `min_delta`.
        waited: epochs since `to_beat` was set.
    """

    by: BestBy
    higher: Bool
    value: Measured | None
    epoch: Total
    to_beat: Measured | None
    waited: Total

    @classmethod
    def start(cls, by: str, higher: bool) -> Best:
        """The record before the first epoch ends."""
        return cls(by, higher, None, 0, None, 0)

    def after(
        self,
        epoch: int,
        train: Score | None,
        validation: Score | None,
        metrics: Mapping[str, float],
        min_delta: float = 0.0,
    ) -> Best:
        """The record after `epoch` ended with these scores, and with `metrics` of the validation part.

        Among equal epochs the first one counts. An epoch without the metric is no improvement.
        """
        value = self.measured(train, validation, metrics)
        if value is None:
            return replace(self, waited=self.waited + 1)
        if self._gain(value, self.to_beat) > min_delta:
            updated = replace(self, to_beat=value, waited=0)
        else:
            updated = replace(self, waited=self.waited + 1)
        return replace(updated, value=value, epoch=epoch) if self._gain(value, self.value) > 0 else updated

    def measured(self, train: Score | None, validation: Score | None, metrics: Mapping[str, float]) -> float | None:
        """The metric of an epoch; None if it was not measured."""
        part, _, metric = self.by.partition("_")
        score = train if part == "train" else validation
        if score is not None and metric in score._fields:
            found: float = getattr(score, metric)
            return found
        return metrics.get(metric) if part == "validation" else None

    def _gain(self, value: float, reference: float | None) -> float:
        """The improvement over `reference`: positive is better, whether high or low values are."""
        if reference is None:
            return float("inf")
        return value - reference if self.higher else reference - value


LOST = Best.start("", higher=False)
"""Stands for a damaged record in a checkpoint. Resumption looks for the best epoch anew."""
