"""What a page shows of the columns of a table: how much each one matters for the loss, and its values in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from adtrain.data import Split
from adtrain.data.table_encoder import TableEncoder
from adtrain.training.evaluation import mean_loss
from adtrain.training.model_file import TrainedModel

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
