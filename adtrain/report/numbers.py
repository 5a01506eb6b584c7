"""What a page shows of predicted numbers, and of labels that are each 0 or 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from adtrain import metrics
from adtrain.report.importance import TableColumns
from adtrain.report.plot import Axis, Plot, ticks
from adtrain.training.scores import amount_text, value_text
from adtrain.training.tasks import TargetScores

MOST_POINTS, MOST_TARGETS = 500, 12


@dataclass(frozen=True)
class NumberPredictions:
    """The true and the predicted numbers of the test images in original units, float64 (N, targets), and the scores.

    `columns` are those of the table that the examples are rows of.
    """

    targets: tuple[str, ...]
    true: np.ndarray
    predicted: np.ndarray
    scores: TargetScores
    columns: TableColumns | None = None

    def points(self) -> np.ndarray:
        """The indices of at most MOST_POINTS examples, evenly spaced."""
        return np.unique(np.linspace(0, len(self.true) - 1, MOST_POINTS).astype(np.int64))


@dataclass(frozen=True)
class LabelPredictions:
    """How often each label of the test images is found, found wrongly, and missed.

    `columns` are those of the table that the examples are rows of.
    """

    labels: tuple[str, ...]
    counts: metrics.Counts
    columns: TableColumns | None = None


def target_columns(found: NumberPredictions) -> dict[str, str]:
    """The headings of `by_target`, with the kinds of their cells."""
    return {"target": "text", "mean": "minor", **dict.fromkeys(found.scores._fields, ""), "largest error": ""}


def by_target(found: NumberPredictions) -> list[list[str]]:
    """For each target its name, mean, scores and largest error."""
    means, largest = found.true.mean(axis=0), np.abs(found.true - found.predicted).max(axis=0)
    columns = [[value_text(name, x) for x in values] for name, values in found.scores._asdict().items()]
    numbers = [[amount_text(x) for x in values] for values in (means, largest)]
    return [list(row) for row in zip(found.targets, numbers[0], *columns, numbers[1], strict=True)]


def by_label(found: LabelPredictions) -> list[list[str]]:
    """For each label its name, how many examples have it, precision, recall and F1."""
    counts = found.counts
    columns = zip(counts.precision, counts.recall, counts.f1, strict=True)
    return [
        [name, f"{int(true):,}", *(f"{x:.2%}" for x in values)]
        for name, true, values in zip(
            found.labels, counts.true_positives + counts.false_negatives, columns, strict=True
        )
    ]


def predicted_against_true(name: str, true: np.ndarray, predicted: np.ndarray) -> Markup:
    """A scatter plot; on the diagonal predictions are exact."""
    both = np.concatenate([true, predicted])
    axis = ticks(float(both.min()), float(both.max()))
    plot = Plot(f"{name}: predicted against true", Axis("true", axis), Axis("predicted", axis))
    plot.line([(axis[0], axis[0]), (axis[-1], axis[-1])], "level")
    return _marked(plot, true, predicted)


def residuals(name: str, true: np.ndarray, predicted: np.ndarray) -> Markup:
    """A scatter plot of true minus predicted number against the predicted one."""
    residual = true - predicted
    x = ticks(float(predicted.min()), float(predicted.max()))
    y = ticks(min(float(residual.min()), 0.0), max(float(residual.max()), 0.0))
    plot = Plot(f"{name}: residuals", Axis("predicted", x), Axis("true - predicted", y))
    plot.line([(x[0], 0.0), (x[-1], 0.0)], "level")
    return _marked(plot, predicted, residual)


def plots(found: NumberPredictions) -> list[tuple[str, Markup]]:
    """For each of the first MOST_TARGETS targets titles and plots: predicted against true numbers, and residuals."""
    rows = found.points()
    targets = zip(found.targets, found.true[rows].T, found.predicted[rows].T, strict=True)
    return [
        plot
        for name, true, predicted in list(targets)[:MOST_TARGETS]
        for plot in (
            (name, predicted_against_true(name, true, predicted)),
            (f"{name}: residuals", residuals(name, true, predicted)),
        )
    ]


def left_out(found: NumberPredictions) -> str:
    """What the plots leave out."""
    text, rows = "", len(found.points())
    if rows < len(found.true):
        text += f" {rows:,} of {len(found.true):,} test examples are shown."
    if len(found.targets) > MOST_TARGETS:
        text += f" The first {MOST_TARGETS} of {len(found.targets)} targets are shown."
    return text


def _marked(plot: Plot, xs: np.ndarray, ys: np.ndarray) -> Markup:
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        plot.marker(x, y, "train", f"{x:.6g}, {y:.6g}", radius=2)
    return plot.svg()
