"""The learning curves of a run, as numbers to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from adtrain.report.record import Record
from adtrain.report.ticks import ticks

SCORES = ("train", "validation")
MOST_POINTS, MOST_MARKERS = 1000, 60


class Curve(NamedTuple):
    """Points over the epochs. `name` is its legend; a faint curve has none."""

    name: str
    part: str
    epochs: Sequence[float]
    values: Sequence[float]

    @property
    def marked(self) -> bool:
        """Whether each point is one to look at: scores of epochs, where there are not too many."""
        return self.name in SCORES and len(self.epochs) <= MOST_MARKERS


class Panel(NamedTuple):
    """Curves that are drawn together; `text` writes a value of theirs."""

    title: str
    curves: Sequence[Curve]
    text: Callable[[float], str]

    def ticks(self) -> tuple[Sequence[float], Sequence[float]]:
        """The numbers at the axes of the epochs and of the values; the axes end at the outer ones."""
        values = [y for curve in self.curves for y in curve.values]
        last = max(x for curve in self.curves for x in curve.epochs)
        return ticks(0, last, whole=True), ticks(min(values), max(values))

    def tick(self, y: float) -> str:
        """A number at the axis of the values, percent where they are."""
        return f"{y * 100:.6g}%" if self.text(y).endswith("%") else f"{y:.6g}"


def panels(record: Record) -> list[Panel]:
    """Loss, accuracy and learning rate; empty where no epoch is over.

    A score of the training images is the mean over an epoch while the weights changed, at the epoch's end; the faint
    curve is of some hundred steps each.
    """
    if not record.epochs:
        return []
    first = record.epochs[0]
    steps = first["step"] / first["epoch"]
    intervals = record.intervals[:: -(-len(record.intervals) // MOST_POINTS) or 1]
    at = [line["step"] / steps for line in intervals]

    def scores(field: str) -> list[Curve]:
        found = [Curve("", "train", at, [line["train"][field] for line in intervals])]
        for part in SCORES:
            if lines := [line for line in record.epochs if line.get(part)]:
                epochs, values = [line["step"] / steps for line in lines], [line[part][field] for line in lines]
                found.append(Curve(part, part, epochs, values))
        return found

    rates = [line["learning_rate"] for line in intervals]
    return [
        Panel("loss", scores("loss"), lambda x: f"{x:.4f}"),
        Panel("accuracy", scores("accuracy"), lambda x: f"{x:.2%}"),
        Panel("learning rate", [Curve("learning rate", "rate", at, rates)], lambda x: f"{x:.3g}"),
    ]
