"""The data of a run's learning curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from adtrain.report.record import Record
from adtrain.report.ticks import ticks
from adtrain.training.scores import value_text

SCORES = ("train", "validation")
MOST_POINTS, MOST_MARKERS = 1000, 60


class Curve(NamedTuple):
    """Points over the epochs. `name` is the entry in the legend, empty for a faint curve; `split` is its CSS class."""

    name: str
    split: str
    epochs: Sequence[float]
    values: Sequence[float]

    @property
    def marked(self) -> bool:
        """Whether points get markers: only epoch scores do, and at most MOST_MARKERS of them."""
        return self.name in SCORES and len(self.epochs) <= MOST_MARKERS


class Panel(NamedTuple):
    """Curves in one chart; `format_value` formats their values."""

    title: str
    curves: Sequence[Curve]
    format_value: Callable[[float], str]

    def ticks(self) -> tuple[Sequence[float], Sequence[float]]:
        """The ticks of the epoch axis and of the value axis. Each axis spans its first to its last tick."""
        values = [y for curve in self.curves for y in curve.values]
        last = max(x for curve in self.curves for x in curve.epochs)
        return ticks(0, last, whole=True), ticks(min(values), max(values))

    def format_tick(self, y: float) -> str:
        """The label of a tick on the value axis, in percent if the values are."""
        return f"{y * 100:.6g}%" if self.format_value(y).endswith("%") else f"{y:.6g}"


def panels(record: Record) -> list[Panel]:
    """Loss, the metrics and, if there are intervals, learning rate; empty if no epoch is complete.

    A training score is the mean over an epoch, while the weights were changing, and is drawn at the epoch's end. The
    faint curve shows the scores of the single intervals.
    """
    if not record.epochs:
        return []
    first = record.epochs[0]
    steps_per_epoch = first.step / first.epoch
    intervals = record.intervals[:: -(-len(record.intervals) // MOST_POINTS) or 1]
    positions = [line.step / steps_per_epoch for line in intervals]

    def curves(field: str) -> list[Curve]:
        values = [getattr(line.train, field) for line in intervals]
        drawn = [Curve("", "train", positions, values)] if values else []
        for split in SCORES:
            if reached := [(line.step, score) for line in record.epochs if (score := getattr(line, split)) is not None]:
                epochs = [step / steps_per_epoch for step, _ in reached]
                drawn.append(Curve(split, split, epochs, [getattr(score, field) for _, score in reached]))
        return drawn

    found = [Panel(name, curves(name), partial(value_text, name)) for name in first.train._fields]
    if rates := [line.learning_rate for line in intervals]:
        found.append(Panel("learning rate", [Curve("learning rate", "rate", positions, rates)], lambda x: f"{x:.3g}"))
    return found
