"""What a model predicts: a class, the next class at each position of a text, numbers, or labels that are each 0 or 1.

A task turns the labels of a batch into the targets of the loss, outputs into predictions, and the sums of a metric over
batches into a score. `sums` runs inside the step, `score` on the host. Every score that adtrain shows is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.trace import scope
from adtrain.data.statistics import offsets
from adtrain.metrics import Counts, psnr, r2
from adtrain.training.scores import (
    LARGEST_LOG,
    ClassScore,
    FieldScore,
    MultilabelScore,
    RegressionScore,
    ResidualScore,
    Score,
    SolutionScore,
    TextScore,
    TokenScore,
)

Labels: TypeAlias = Callable[[], np.ndarray]
"""Returns the labels of the examples of a score. It is called only if they are needed."""


class TargetScores(NamedTuple):
    """The metrics of each number to predict, float64 (targets,), in original units."""

    rmse: np.ndarray
    mae: np.ndarray
    r2: np.ndarray


@dataclass(frozen=True)
class Classification:
    """One class of several. Labels are int64 (N,), outputs (N, classes).

    Attributes:
        one_hot: whether the loss takes one-hot rows (N, classes), as `mse` does, or labels (N,).
        predictions: maps outputs to the probability of each class.
    """

    one_hot: bool
    predictions: Callable[[Value], Value]
    score_kind: ClassVar[type[ClassScore | TextScore | TokenScore]] = ClassScore
    default_metric: ClassVar[str] = "accuracy"
    needs_float64: ClassVar[bool] = False

    @property
    def mixes_targets(self) -> bool:
        """Whether mixup mixes the targets of the loss, rather than the losses."""
        return self.one_hot

    def targets(self, outputs: Value, labels: Value) -> Value:
        """The targets of the loss."""
        return ops.one_hot(labels, outputs.shape[1], outputs.dtype) if self.one_hot else labels

    def zero(self) -> np.ndarray:
        """The sums of no batch."""
        return np.zeros((), np.int64)

    def sums(self, outputs: Value, labels: Value) -> Value:
        """The number of rows whose most probable class is the label: int64, shape ().

        The softmax keeps the order of the outputs. The other predictions do not, where they reach 0 or 1.
        """
        with scope("accuracy"):
            values = self.predictions(outputs) if self.one_hot else outputs
            return ops.sum(ops.equal(ops.argmax(values, axis=1), labels))

    def score(self, loss: float, sums: Sequence[float], count: int, labels: Labels) -> Score:
        """The score of `count` examples with this mean loss and these sums."""
        return ClassScore(loss, sums[0] / count)


@dataclass(frozen=True)
class NextClass(Classification):
    """The class that follows each position of a sequence. Labels are int32 (N, length), outputs (N, length, classes).

    The loss takes each position as a row: outputs (N * length, classes), labels (N * length,).
    """

    length: int
    score_kind: ClassVar[type[ClassScore | TextScore | TokenScore]] = TextScore
    default_metric: ClassVar[str] = "perplexity"

    def targets(self, outputs: Value, labels: Value) -> Value:
        return ops.reshape(labels, (-1,))

    def zero(self) -> np.ndarray:
        return np.zeros(2)

    def sums(self, outputs: Value, labels: Value) -> Value:
        """Sums over the positions: how often the most probable class is the label, and -log softmax(outputs)[label].

        float64 (2,).
        """
        rows = ops.reshape(outputs, (-1, outputs.shape[-1]))
        targets = self.targets(rows, labels)
        correct = ops.astype(super().sums(rows, targets), np.float64)
        with scope("perplexity"):
            # A mean, because it is then the same equation as that of the loss.
            log_loss = ops.astype(ops.cross_entropy(rows, targets), np.float64) * targets.size
            return ops.stack([correct, log_loss])

    def score(self, loss: float, sums: Sequence[float], count: int, labels: Labels) -> Score:
        correct, log_loss = (x / (count * self.length) for x in sums[:2])
        return TextScore(loss, math.exp(min(log_loss, LARGEST_LOG)), correct)


@dataclass(frozen=True)
class NextToken(NextClass):
    """The token that follows each position of a sequence.

    `lengths` are the bytes of each token. `separator` is the token with which a document begins, if documents that
    share a sequence are separate.
    """

    lengths: tuple[int, ...]
    separator: int | None = None
    score_kind: ClassVar[type[ClassScore | TextScore | TokenScore]] = TokenScore

    def zero(self) -> np.ndarray:
        return np.zeros(3)

    def sums(self, outputs: Value, labels: Value) -> Value:
        """The sums of `NextClass`, and the bytes of the labels: float64 (3,)."""
        of_classes = super().sums(outputs, labels)
        with scope("bits_per_byte"):
            lengths = array(np.array(self.lengths, np.int32), device=labels.device)
            found = ops.sum(ops.embedding(ops.reshape(labels, (-1,)), lengths), keepdims=True)
            return ops.concatenate([of_classes, ops.astype(found, np.float64)])

    def score(self, loss: float, sums: Sequence[float], count: int, labels: Labels) -> Score:
        scored = super().score(loss, sums, count, labels)._asdict()
        return TokenScore(**scored, bits_per_byte=sums[1] / math.log(2) / max(sums[2], 1.0))


@dataclass(frozen=True)
class Regression:
    """Numbers. Labels are float64 (N, targets) in their original units, outputs (N, targets).

    Attributes:
        mean, std: numbers per target, of the training part.
        normalized: whether the loss compares outputs with (label - mean) / std; then predictions are in original units.
        traced: `mean` and `std` as values (targets,), in a Program of members that have different ones.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    normalized: bool
    traced: tuple[Value, Value] | None = None
    score_kind: ClassVar[type[RegressionScore]] = RegressionScore
    default_metric: ClassVar[str] = "rmse"
    mixes_targets: ClassVar[bool] = True

    @property
    def needs_float64(self) -> bool:
        """Whether float32 loses differences between the predicted numbers; see `data.statistics`."""
        return self.normalized and any(offsets(self.mean, self.std))

    def targets(self, outputs: Value, labels: Value) -> Value:
        """The targets of the loss."""
        if self.normalized:
            mean, std = self._statistics
            labels = (labels - mean) / std
        return ops.astype(labels, outputs.dtype)

    def predictions(self, outputs: Value) -> Value:
        """The predicted numbers in original units: float64 (N, targets)."""
        mean, std = self._statistics
        numbers = ops.astype(outputs, np.float64)
        return numbers * std + mean if self.normalized else numbers

    def zero(self) -> np.ndarray:
        """The sums of no batch."""
        return np.zeros(2 * len(self.mean))

    @property
    def _statistics(self) -> tuple[Any, Any]:
        """The mean and the deviation of each target, as arrays or values (targets,)."""
        return self.traced or (np.array(self.mean), np.array(self.std))

    @property
    def _unit(self) -> np.ndarray:
        """The unit of the summed errors, for each target: that of the loss, so that squares do not overflow."""
        return np.array(self.std if self.normalized else (1.0,) * len(self.std))

    def sums(self, outputs: Value, labels: Value) -> Value:
        """For each target the sums of |error| and error^2, in the unit of the loss: float64 (2 * targets,)."""
        with scope("metrics"):
            errors = self.predictions(outputs) - labels
            if self.normalized:
                errors = errors / self._statistics[1]
            return ops.sum(ops.concatenate([ops.abs(errors), ops.square(errors)], axis=1), axis=0)

    def by_target(self, sums: Sequence[float], labels: np.ndarray) -> TargetScores:
        """The metrics of each target, from the sums over the examples with these labels (N, targets)."""
        absolute, squared = np.reshape(np.array(sums), (2, -1))
        count, norms = len(labels), self._unit * np.sqrt(squared)
        return TargetScores(norms / math.sqrt(count), self._unit * absolute / count, r2(labels, norms))

    def score(self, loss: float, sums: Sequence[float], count: int, labels: Labels) -> Score:
        """The score of `count` examples with this mean loss and these sums."""
        return RegressionScore(loss, *(float(x.mean()) for x in self.by_target(sums, labels())))


@dataclass(frozen=True)
class Multilabel:
    """Labels that are each 0 or 1: float64 (N, labels). Outputs are logits (N, labels)."""

    labels: int
    score_kind: ClassVar[type[MultilabelScore]] = MultilabelScore
    default_metric: ClassVar[str] = "f1"
    mixes_targets: ClassVar[bool] = True
    needs_float64: ClassVar[bool] = False

    def targets(self, outputs: Value, labels: Value) -> Value:
        """The targets of the loss."""
        return ops.astype(labels, outputs.dtype)

    def predictions(self, outputs: Value) -> Value:
        """The probability of each label."""
        return ops.sigmoid(outputs)

    def zero(self) -> np.ndarray:
        """The sums of no batch."""
        return np.zeros(1 + 3 * self.labels)

    def sums(self, outputs: Value, labels: Value) -> Value:
        """The rows without a wrong label; then for each label true positives, false positives and false negatives.

        float64 (1 + 3 * labels,). A label is predicted if its logit is above 0.
        """
        with scope("metrics"):
            found = ops.astype(ops.greater(outputs, 0.0), np.float64)
            counts = [found * labels, found * (1.0 - labels), (1.0 - found) * labels]
            wrong = ops.sum(counts[1] + counts[2], axis=1, keepdims=True)
            exact = ops.astype(ops.equal(wrong, 0.0), np.float64)
            return ops.sum(ops.concatenate([exact, *counts], axis=1), axis=0)

    def by_label(self, sums: Sequence[float]) -> Counts:
        """How often each label is found, found wrongly, and missed."""
        return Counts(*np.reshape(np.array(sums[1:]), (3, -1)))

    def score(self, loss: float, sums: Sequence[float], count: int, labels: Labels) -> Score:
        """The score of `count` examples with this mean loss and these sums."""
        return MultilabelScore(loss, sums[0] / count, float(self.by_label(sums).f1.mean()))


@dataclass(frozen=True)
class Solution(Regression):
    """The solution of equations. Labels are those of `Regression`, and 0 where the solution is not `known`."""

    known: bool = False

    @property
    def score_kind(self) -> type[SolutionScore] | type[ResidualScore]:  # type: ignore[override]
        return SolutionScore if self.known else ResidualScore

    @property
    def default_metric(self) -> str:  # type: ignore[override]
        return "error" if self.known else "loss"

    def zero(self) -> np.ndarray:
        return np.zeros(2)

    def sums(self, outputs: Value, labels: Value) -> Value:
        """The sums of the squared errors and of the squares of the labels: float64 (2,); 0 if they are not known."""
        with scope("metrics"):
            if not self.known:
                return ops.zeros((2,), np.float64, labels.device)
            errors = self.predictions(outputs) - labels
            return ops.stack([ops.sum(ops.square(errors)), ops.sum(ops.square(labels))])

    def score(self, loss: float, sums: Sequence[float], count: int, labels: Labels) -> Score:
        if not self.known:
            return ResidualScore(loss)
        return SolutionScore(loss, math.sqrt(sums[0] / sums[1]) if sums[1] else math.sqrt(sums[0]))


@dataclass(frozen=True)
class Field(Regression):
    """The numbers of a neural field. Labels are float32 (N, outputs).

    Attributes:
        peak: the difference of the largest and the smallest possible number, for the PSNR.
    """

    peak: float = 1.0
    score_kind: ClassVar[type[FieldScore]] = FieldScore  # type: ignore[assignment]
    default_metric: ClassVar[str] = "psnr"
    needs_float64: ClassVar[bool] = False

    def zero(self) -> np.ndarray:
        return np.zeros(1)

    def sums(self, outputs: Value, labels: Value) -> Value:
        """The sum of the squared errors: float64 (1,)."""
        with scope("metrics"):
            errors = self.predictions(outputs) - labels
            return ops.reshape(ops.sum(ops.square(errors)), (1,))

    def score(self, loss: float, sums: Sequence[float], count: int, labels: Labels) -> Score:
        mse = sums[0] / (count * len(self.mean))
        return FieldScore(loss, psnr(mse, self.peak), math.sqrt(mse))


Task: TypeAlias = Classification | Regression | Multilabel


def plausible(task: Task, sums: Sequence[float], count: int) -> bool:
    """Whether these can be the sums of `count` examples."""
    if len(sums) != task.zero().size:
        return False
    if isinstance(task, Regression):
        return all(x >= 0 for x in sums)
    if isinstance(task, NextClass):
        return 0 <= sums[0] <= count * task.length and min(sums) >= 0
    return all(0 <= x <= count for x in sums)


def host_sums(sums: Any) -> list[list[float]]:
    """The logged sums of each step, (steps, ...), as lists of numbers."""
    found: list[list[float]] = np.reshape(sums, (len(sums), -1)).astype(np.float64).tolist()
    return found
