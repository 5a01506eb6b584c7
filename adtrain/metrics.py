"""Scores: how each is written and compared, and the formulas, in NumPy, with the names and definitions of scikit-learn.

`SCALES` has all scores. `METRICS` has those of predictions that have all been computed: a config can name them in
`training.metrics`. The others are made of sums over batches (`training/tasks.py`), by the formulas here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

TOP = 5
BINS = 15
"""Intervals of probability for the calibration error (C. Guo et al.: "On Calibration of Modern Neural Networks")."""


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
    "roc_auc": Scale(higher_is_better=True),
    "average_precision": Scale(higher_is_better=True),
    "calibration_error": Scale(),
    "rmse": AMOUNT,
    "mae": AMOUNT,
    "r2": Scale(higher_is_better=True),
    "perplexity": Scale("{:.3f}"),
    "bits_per_byte": Scale(),
    "gradient_noise": AMOUNT,
    "per_example_norm": AMOUNT,
    "top_eigenvalues": AMOUNT,
    "error": Scale("{:.3g}"),
    "psnr": Scale("{:.2f} dB", higher_is_better=True),
}
"""The scores by name."""

HIGHEST_PSNR = 200.0
"""The largest PSNR in decibels, also if the error is 0."""

LOWEST_R2 = -1e300
"""The least R², also if the squared error exceeds that of the mean by more, as for a target that is nearly constant."""


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


def psnr(mse: float, peak: float) -> float:
    """The peak signal-to-noise ratio in decibels, 10 log10(peak² / mse), at most HIGHEST_PSNR."""
    most = 10 ** (HIGHEST_PSNR / 20)
    return 20 * math.log10(min(peak / max(math.sqrt(mse), peak / most), most))


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


def area_under_roc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive example has a higher score than a negative one; equal scores count one half.

    `scores` are numbers (N,), `positive` is bool (N,). There are examples of both kinds.
    """
    found, group = np.unique(scores, return_inverse=True)
    positives, all_ = (np.bincount(group, x, len(found)) for x in (positive, np.ones(len(scores))))
    negatives = all_ - positives
    lower = np.cumsum(negatives) - negatives
    return float((positives * (lower + negatives / 2)).sum() / (positives.sum() * negatives.sum()))


def area_under_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """The mean of the precisions at the scores of the positive examples, as thresholds from high to low.

    `scores` are numbers (N,), `positive` is bool (N,). At least one example is positive.
    """
    found, group = np.unique(-scores, return_inverse=True)
    positives, all_ = (np.bincount(group, x, len(found)) for x in (positive, np.ones(len(scores))))
    return float((positives * (np.cumsum(positives) / np.cumsum(all_))).sum() / positives.sum())


def _of_ranking(area: Callable[[np.ndarray, np.ndarray], float], meaning: str) -> Callable[[ClassPredictions], ByClass]:
    """An area that ranks the examples by the probability of each class."""

    def compute(found: ClassPredictions) -> ByClass:
        by_class = {}
        for i, name in enumerate(found.classes):
            positive = found.labels == i
            if positive.any() and not positive.all():
                by_class[name] = area(found.probabilities[:, i], positive)
        return ByClass(float(np.mean([*by_class.values()])) if by_class else 0.0, by_class)

    compute.__doc__ = f"{meaning} for each class against the others, and the mean over the classes with both kinds."
    return compute


def calibration_error(found: ClassPredictions) -> float:
    """How far the probability of the predicted class is from the fraction of right predictions, on average.

    The examples are in 15 intervals of that probability. The differences are weighted by the numbers of examples.
    """
    highest = found.probabilities.max(axis=1)
    right = found.probabilities.argmax(axis=1) == found.labels
    interval = np.minimum((highest * BINS).astype(np.int64), BINS - 1)
    return float(np.abs(np.bincount(interval, right - highest)).sum() / len(highest))


MetricValue: TypeAlias = float | ByClass | Sequence[float] | Sequence[Sequence[int]]
Metric: TypeAlias = Callable[[Any], MetricValue]
"""A function of `ClassPredictions`, or, if it is one of `curvature.METRICS`, of a loss."""

METRICS: dict[str, Metric] = {
    "top5": top5,
    "precision": _by_class("precision"),
    "recall": _by_class("recall"),
    "f1": _by_class("f1"),
    "roc_auc": _of_ranking(area_under_roc, "The area under the ROC curve"),
    "average_precision": _of_ranking(area_under_precision, "The average precision"),
    "calibration_error": calibration_error,
    "confusion": confusion,
}
"""Metrics by name, of a classification's predictions. `curvature.METRICS` has those of its loss."""


def percentiles(numbers: Sequence[float], percents: Sequence[float]) -> list[float]:
    """The values of `numpy.percentile` with linear interpolation, with the same bits. `percents` are in [0, 100]."""
    ordered = sorted(numbers)
    results = []
    for percent in percents:
        index = percent / 100 * (len(ordered) - 1)
        low = ordered[int(index)]
        high = ordered[min(int(index) + 1, len(ordered) - 1)]
        fraction, step = index - int(index), high - low
        results.append(low + step * fraction if fraction < 0.5 else high - step * (1 - fraction))
    return results
