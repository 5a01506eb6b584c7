"""Scores: how each is written and compared, and the formulas, in NumPy, with the names and definitions of scikit-learn.

`SCALES` has all scores. `METRICS` has those of predictions that have all been computed: a config can name them in
`training.metrics`. The others are made of sums over batches (`training/tasks.py`), by the formulas here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

TOP = 5


@dataclass(frozen=True)
class Scale:
    """How the values of a score are written, and whether higher ones are better."""

    form: str = "{:.4f}"
    higher_is_better: bool = False


SHARE, AMOUNT = Scale("{:.2%}", higher_is_better=True), Scale("{:.4g}")
SCALES = {
    "loss": Scale(),
    "accuracy": SHARE,
    "f1": SHARE,
    "precision": SHARE,
    "recall": SHARE,
    "top5": SHARE,
    "rmse": AMOUNT,
    "mae": AMOUNT,
    "r2": Scale(higher_is_better=True),
    "perplexity": Scale("{:.3f}"),
    "bits_per_byte": Scale(),
}
"""The scores by name."""

LOWEST_R2 = -1e300
"""Where the squared error exceeds that of the mean by more, as for a target that hardly varies."""


class ClassPredictions(NamedTuple):
    """`probabilities` (N, classes), `labels` int64 (N,), and the names of the classes."""

    probabilities: np.ndarray
    labels: np.ndarray
    classes: Sequence[str]


@dataclass(frozen=True)
class ByClass:
    """A metric of each class, by name, and its mean over the classes that occur or are predicted."""

    macro: float
    by_class: dict[str, float]


class Counts(NamedTuple):
    """For each class or label, how often it is predicted correctly, predicted wrongly, and missed: (labels,)."""

    true_positives: np.ndarray
    false_positives: np.ndarray
    false_negatives: np.ndarray

    @property
    def precision(self) -> np.ndarray:
        """tp / (tp + fp), 0 where nothing is predicted."""
        return ratio(self.true_positives, self.true_positives + self.false_positives)

    @property
    def recall(self) -> np.ndarray:
        """tp / (tp + fn), 0 where there is none to find."""
        return ratio(self.true_positives, self.true_positives + self.false_negatives)

    @property
    def f1(self) -> np.ndarray:
        """2 tp / (2 tp + fp + fn), 0 where all are 0."""
        return ratio(2 * self.true_positives, 2 * self.true_positives + self.false_positives + self.false_negatives)


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, 0 where `whole` is 0."""
    found: np.ndarray = np.divide(part, whole, out=np.zeros(whole.shape), where=whole != 0)
    return found


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """The number of examples by label (row) and predicted class (column): int64 (classes, classes)."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, predicted), 1)
    return counts


def class_counts(confusion: np.ndarray) -> Counts:
    """The counts of each class of a confusion matrix."""
    hits = np.diag(confusion)
    return Counts(hits, confusion.sum(axis=0) - hits, confusion.sum(axis=1) - hits)


def r2(true: np.ndarray, error_norms: np.ndarray) -> np.ndarray:
    """The coefficient of determination of each column of numbers (N, targets), at least LOWEST_R2.

    `error_norms` (targets,) are the roots of the sums of the squared errors. The result is 1 minus the squared error
    divided by that of the column's mean. Of a constant column it is 1 if the error is 0, otherwise 0.
    """
    deviations = true - true.mean(axis=0)
    deviations -= deviations.mean(axis=0)  # of numbers far from 0 the first mean is rounded
    largest = np.abs(deviations).max(axis=0)
    constant = (np.ptp(true, axis=0) == 0) | (largest == 0)
    scale = np.where(constant, 1.0, largest)  # squares of very small and very large numbers are not float64
    norms = np.where(constant, 1.0, scale * np.sqrt(np.square(deviations / scale).sum(axis=0)))
    with np.errstate(over="ignore"):
        found: np.ndarray = np.where(constant, error_norms == 0, 1 - np.square(error_norms / norms))
    return np.maximum(found, LOWEST_R2)


def top5(found: ClassPredictions) -> float:
    """The fraction of examples whose label is among the five most probable classes; of equal ones the first count."""
    order = np.argsort(-found.probabilities, axis=1, kind="stable")[:, :TOP]
    return float((order == found.labels[:, np.newaxis]).any(axis=1).mean())


def confusion(found: ClassPredictions) -> list[list[int]]:
    """The rows of the confusion matrix: the number of examples by label and by most probable class."""
    matrix: list[list[int]] = _confusion(found).tolist()
    return matrix


def _confusion(found: ClassPredictions) -> np.ndarray:
    return confusion_matrix(found.labels, found.probabilities.argmax(axis=1), len(found.classes))


def _by_class(metric: str) -> Callable[[ClassPredictions], ByClass]:
    """The metric of `Counts` for each class."""

    def compute(found: ClassPredictions) -> ByClass:
        matrix = _confusion(found)
        values = getattr(class_counts(matrix), metric)
        used = (matrix.sum(axis=0) + matrix.sum(axis=1)) > 0
        by_class = {name: float(x) for name, x in zip(found.classes, values, strict=True)}
        return ByClass(float(values[used].mean()), by_class)

    compute.__doc__ = f"The {metric} of each class, and the mean over the classes."
    return compute


MetricValue: TypeAlias = float | ByClass | Sequence[Sequence[int]]
Metric: TypeAlias = Callable[[ClassPredictions], MetricValue]

METRICS: dict[str, Metric] = {
    "top5": top5,
    "precision": _by_class("precision"),
    "recall": _by_class("recall"),
    "f1": _by_class("f1"),
    "confusion": confusion,
}
"""Metrics by name, of a classification's predictions."""
