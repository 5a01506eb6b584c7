"""What a page shows of a table: how much each column matters for the loss, predicted numbers, and labels of 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from adtrain import metrics
from adtrain.data import Split
from adtrain.data.table_encoder import TableEncoder
from adtrain.report.plot import Axis, Plot, ticks
from adtrain.training.evaluation import mean_loss
from adtrain.training.model_file import TrainedModel
from adtrain.training.scores import amount_text, value_text
from adtrain.training.tasks import TargetScores

REPEATS = 5
MOST_ROWS, MOST_EVALUATED = 2000, 4_000_000
"""The most test rows, and the most rows of all evaluations together."""

MOST_COLUMNS, MOST_VALUES = 25, 8
"""The most columns that a page lists, and that it shows of a row."""


@dataclass(frozen=True)
class Importance:
    """How much the loss rises where the values of a column are shuffled: one number for each repeat."""

    column: str
    rises: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.rises))


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table, the most important first.

    Attributes:
        found: in that order.
        loss: of the `rows` test rows as they are.
        encoder: has made the features of the rows.
        offset: what was subtracted from them; empty for nothing.
    """

    found: Sequence[Importance]
    loss: float
    rows: int
    encoder: TableEncoder
    offset: tuple[float, ...]

    def bars(self) -> list[tuple[str, float, str, str]]:
        """For each of the first columns its name, the length of its bar from 0 to 1, the mean rise, and its range."""
        largest = max((x.mean for x in self.found), default=0.0)
        return [
            (x.column, max(x.mean, 0.0) / largest if largest > 0 else 0.0, f"{x.mean:+.4f}", _range(x.rises))
            for x in self.found[:MOST_COLUMNS]
        ]

    def note(self) -> str:
        """How the bars were measured, and what they leave out."""
        text = (
            f"How much the loss of {self.rows:,} test rows, {self.loss:.4f}, rises where the values of one column are "
            f"shuffled among the rows: mean and range of {REPEATS} shuffles. Columns with the same information hide "
            "each other's importance."
        )
        hidden = len(self.found) - MOST_COLUMNS
        return f"{text} {hidden} columns of lower importance are left out." if hidden > 0 else text

    def values(self, features: np.ndarray) -> list[tuple[str, str]]:
        """Names and values of the most important columns in a row (F, 1, 1)."""
        numbers = features.reshape(-1) + np.array(self.offset or 0.0)
        texts = self.encoder.texts(numbers)
        return [(x.column, texts[x.column]) for x in self.found[:MOST_VALUES]]


def _range(rises: Sequence[float]) -> str:
    return f"{min(rises):.4f} to {max(rises):.4f}"


def table_columns(trained: TrainedModel, test: Split, device: str) -> TableColumns | None:
    """The importance of each column for the loss on the test rows; None if the data are no table of features."""
    encoder = trained.encoder
    if encoder is None or test.images.shape[1:] != (len(encoder.features), 1, 1) or not len(test):
        return None
    columns = encoder.columns.features
    rows = min(len(test), MOST_ROWS, max(1, MOST_EVALUATED // (REPEATS * len(columns))))
    chosen = np.arange(rows) * len(test) // rows
    images, labels = np.asarray(test.images[chosen]), np.asarray(test.labels[chosen])

    def loss(images: np.ndarray) -> float:
        sums = trained.evaluation(Split(images, labels), device).sums(trained.params, trained.statistics)
        return mean_loss(sums.loss, sums.weight)

    before, ends = loss(images), np.cumsum([0, *map(encoder.width, columns)])
    found = []
    for number, (column, (begin, end)) in enumerate(zip(columns, pairwise(ends.tolist()), strict=True)):
        rises = []
        for repeat in range(REPEATS):
            shuffled = images.copy()
            order = np.random.default_rng([number, repeat]).permutation(rows)
            shuffled[:, begin:end] = images[order, begin:end]
            rises.append(loss(shuffled) - before)
        found.append(Importance(column.title, tuple(rises)))
    found.sort(key=lambda x: -x.mean)
    return TableColumns(found, before, rows, encoder, trained.network.offset)


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
