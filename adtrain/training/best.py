"""Which epoch has been the best so far, and for how long none has been better."""

from __future__ import annotations

from dataclasses import dataclass, replace

from adtrain.training.evaluation import Score


@dataclass(frozen=True)
class Best:
    """The best epoch by the metric `by`, such as validation_accuracy.

    Attributes:
        value, epoch: of the best one; None and 0 before the first.
        to_beat: what early stopping compares with: the last value that improved on the one before by `min_delta`.
        waited: epochs since then.
    """

    by: str
    value: float | None = None
    epoch: int = 0
    to_beat: float | None = None
    waited: int = 0

    def after(self, epoch: int, train: Score, validation: Score | None, min_delta: float = 0.0) -> Best:
        """The best once `epoch`, with these scores, is over. Of equal epochs the first is the best."""
        part, _, metric = self.by.partition("_")
        score = train if part == "train" else validation
        assert score is not None, "a run without validation images is not judged by them"
        value: float = getattr(score, metric)
        if self._gain(value, self.to_beat) > min_delta:
            found = replace(self, to_beat=value, waited=0)
        else:
            found = replace(self, waited=self.waited + 1)
        return replace(found, value=value, epoch=epoch) if self._gain(value, self.value) > 0 else found

    def _gain(self, value: float, over: float | None) -> float:
        if over is None:
            return float("inf")
        return value - over if self.by.endswith("accuracy") else over - value
