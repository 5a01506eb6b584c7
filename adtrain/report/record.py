"""The results of a run from its folder, also of an unfinished run; and learning curves, and losses by learning rate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup

from adtrain.config import Config
from adtrain.config.plugged import NONE, Trust
from adtrain.report.plot import Axis, Plot, log_ticks, tick_text, ticks
from adtrain.sweeps.rates import RateSearch
from adtrain.templates import macro
from adtrain.text import counted
from adtrain.training import model_file
from adtrain.training.progress import Epoch, Interval, Line, Stopped, Validated, read_metrics
from adtrain.training.scores import HIGHER_IS_BETTER, single_numbers, value_text
from adtrain.training.summary import Summary, read_summary

FEW_EPOCHS = 4
"""Below this number of epochs a training curve has a point for each interval of steps instead of each epoch."""


@dataclass(frozen=True)
class Record:
    """A run: its config, its metrics, and its summary, None if the run is not finished."""

    path: Path
    config: Config
    metrics: list[Line]
    summary: Summary | None

    @property
    def intervals(self) -> list[Interval]:
        return [line for line in self.metrics if isinstance(line, Interval)]

    @property
    def epochs(self) -> list[Epoch]:
        """The complete epochs."""
        return [line for line in self.metrics if isinstance(line, Epoch)]

    @property
    def validations(self) -> list[Epoch | Validated]:
        """The complete epochs and the evaluations within epochs, by step."""
        found = [line for line in self.metrics if isinstance(line, (Epoch, Validated))]
        return sorted(found, key=lambda line: line.step)

    @property
    def scored(self) -> list[Epoch | Interval]:
        """The complete epochs, then the intervals."""
        return [*self.epochs, *self.intervals]

    @property
    def steps_per_epoch(self) -> float:
        """1 if no epoch is complete."""
        return self.epochs[0].step / self.epochs[0].epoch if self.epochs else 1.0

    @property
    def by_interval(self) -> bool:
        """Whether there are too few epochs to draw the training curve by epoch."""
        return len(self.epochs) < FEW_EPOCHS and bool(self.intervals)

    @property
    def stopped(self) -> Stopped | None:
        """The last line of the metrics if it says that the run was stopped, else None."""
        last = self.metrics[-1] if self.metrics else None
        return last if isinstance(last, Stopped) else None

    @property
    def steps(self) -> int:
        """The highest step in the metrics."""
        return max((line.step for line in self.metrics), default=0)


def read(run: Path, trust: Trust = NONE) -> Record:
    """The record of the run in a folder.

    Raises:
        ConfigError: its config.yaml is wrong.
        AdtrainError: the folder holds no run, its metrics cannot be read, or its summary is damaged.
    """
    return Record(run, model_file.config_of(run, trust), read_metrics(run), read_summary(run))


T = TypeVar("T")

SCORES = ("train", "validation")
RATES_WIDTH, RATES_HEIGHT = 720, 360
"""The size of the picture of learning rates."""
HIGHEST_LOSS = 1.2
"""In this picture losses above this multiple of the loss at the smallest rate are drawn at the upper edge."""
MILLION = "million"
MOST_POINTS, MOST_MARKERS = 1000, 60


class Curve(NamedTuple):
    """Points over epochs or steps. `name` is the entry in the legend, empty for a faint curve; `kind` its CSS class.

    `low` and `high` are the ends of a band around the curve, empty if there is none.
    """

    name: str
    kind: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @property
    def marked(self) -> bool:
        """Whether points get markers. A learning rate gets one only if it has a single point."""
        return bool(self.name) and len(self.xs) <= (1 if self.kind == "rate" else MOST_MARKERS)


def alike(items: Iterable[T], settings: Callable[[T], Mapping[str, Any]]) -> list[list[T]]:
    """Items with equal settings together, in the order of their first ones."""
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(json.dumps(settings(item), sort_keys=True, default=str), []).append(item)
    return list(found.values())


def banded(name: str, kind: str, found: Sequence[Mapping[int, float]], per_unit: float = 1) -> Curve | None:
    """The mean of several runs at the positions that all of them have, in a band from the smallest to the largest
    value. A position is divided by `per_unit`. None if there is no such position.
    """
    at = sorted(set.intersection(*map(set, found))) if found else []
    if not at:
        return None
    values = np.array([[points[position] for position in at] for points in found])
    band = [values.min(axis=0).tolist(), values.max(axis=0).tolist()] if len(found) > 1 else [[], []]
    return Curve(name, kind, [position / per_unit for position in at], values.mean(axis=0).tolist(), *band)


class Panel(NamedTuple):
    """Curves in one chart.

    Attributes:
        title: the name of the metric, perhaps after that of the split.
        unit: "epoch", "step" or, of a text, MILLION and its characters, bytes or tokens: the title of the horizontal
            axis.
        value: formats a value of the curves.
        test: the result on the test set, None if there is none.
        kept: the epoch whose weights the run kept, None if it has not ended; `kept_at` is where it ends.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    value: Callable[[float], str]
    test: float | None = None
    kept: int | None = None
    kept_at: float = 0.0

    @property
    def has_log_scale(self) -> bool:
        """Whether a logarithmic axis makes sense: for errors above 0."""
        metric = self.title.split()[-1]
        return metric not in HIGHER_IS_BETTER and metric != "rate" and min(self._values()) > 0

    def draw(self, logarithmic: bool = False) -> Markup:
        """The curves as an SVG element, with the colours of the page around it."""
        return self._plot(logarithmic).svg()

    def picture(self) -> str:
        """The curves as an SVG file of its own, on a logarithmic axis where that makes sense."""
        return macro("plot.svg.j2", "alone")(self._plot(self.has_log_scale))

    def _plot(self, logarithmic: bool) -> Plot:
        """The curves. Markers show their value in a tooltip."""
        values, last = self._values(), max(x for curve in self.curves for x in curve.xs)
        scale = (log_ticks if logarithmic else ticks)(min(values), max(values))
        x, y = (
            Axis(self.unit, ticks(0, last, whole=self.unit in ("epoch", "step"))),
            Axis("", scale, self._tick, logarithmic),
        )
        plot = Plot(f"{self.title} over {self.unit.removesuffix('s')}s", x, y)
        if self.test is not None:
            plot.line([(x.ticks[0], self.test), (x.ticks[-1], self.test)], "level")
        if self.kept is not None:
            plot.line([(self.kept_at, y.ticks[0]), (self.kept_at, y.ticks[-1])], "kept-epoch")
        for curve in self.curves:
            if curve.low:
                low, high = (list(zip(curve.xs, end, strict=True)) for end in (curve.low, curve.high))
                plot.band(low, high, curve.kind)
        for curve in self.curves:
            plot.line(zip(curve.xs, curve.ys, strict=True), f"{'curve' if curve.name else 'faint'} {curve.kind}")
            if curve.marked:
                for at, value in zip(curve.xs, curve.ys, strict=True):
                    tooltip = f"{self.unit} {at:.6g}: {curve.name} {self.value(value)}"
                    plot.marker(at, value, curve.kind, tooltip, 3 if len(curve.xs) > 1 else 4)
        return plot

    def _values(self) -> list[float]:
        values = [y for curve in self.curves for ys in (curve.ys, curve.low, curve.high) for y in ys]
        return values if self.test is None else [*values, self.test]

    def _tick(self, y: float) -> str:
        """The label of a tick on the value axis, in percent if the values are."""
        return f"{y * 100:.6g}%" if self.value(y).endswith("%") else tick_text(y, digits=3)


def panels(record: Record) -> list[Panel]:
    """Loss, the metrics of the scores, those of `training.metrics` on the validation part and, if there are intervals,
    learning rate; empty if no step is complete.

    The horizontal axis has epochs, or steps if no epoch is complete; for a text the number of tokens, in millions.
    """
    if not record.scored:
        return []
    intervals = record.intervals[:: -(-len(record.intervals) // MOST_POINTS) or 1]
    steps, summary, data = record.steps_per_epoch, record.summary, record.config.data
    unit, per_unit = "epoch" if record.epochs else "step", steps
    if data.is_text:
        unit, per_unit = f"{MILLION} {data.options.unit}s", 1e6 / (data.batch_size * data.options.length)
    positions = [line.step / per_unit for line in intervals]

    def curves(field: str) -> list[Curve]:
        drawn = []
        if values := [getattr(line.train, field) for line in intervals]:
            drawn.append(Curve("train" if record.by_interval else "", "train", positions, values))
        for split in SCORES[1:] if record.by_interval else SCORES:
            lines: Sequence[Epoch | Validated] = record.validations if split == "validation" else record.epochs
            if reached := [(line.step, score) for line in lines if (score := getattr(line, split)) is not None]:
                xs = [step / per_unit for step, _ in reached]
                drawn.append(Curve(split, split, xs, [getattr(score, field) for _, score in reached]))
        return drawn

    test = {} if summary is None else summary.test._asdict() | single_numbers(summary.metrics)
    kept = None if summary is None or not record.epochs else summary.model_epoch
    kept_at = (kept or 0) * steps / per_unit
    found = [
        Panel(name, unit, curves(name), partial(value_text, name), test.get(name), kept, kept_at)
        for name in record.scored[0].train._fields
    ]
    for name in dict.fromkeys(name for line in record.epochs for name in line.metrics):
        measured = [(line.step / per_unit, line.metrics[name]) for line in record.epochs if name in line.metrics]
        xs, ys = zip(*measured, strict=True)
        curve = Curve("validation", "validation", xs, ys)
        found.append(Panel(name, unit, [curve], partial(value_text, name), test.get(name), kept, kept_at))
    if rates := [line.learning_rate for line in intervals]:
        curve = Curve("at the end", "rate", positions, rates)
        found.append(Panel("learning rate", unit, [curve], "{:.3g}".format))
    return found


def rates_svg(found: RateSearch) -> str:
    """The picture of `adtrain lr-find`, an SVG file of its own.

    It has the losses, the smooth curve, the rates that are nearly as good as a band, and the proposal as a line.
    """
    rates = [x.rate for x in found.tried]
    losses = {x.rate: x.loss for x in found.tried if x.loss is not None}
    least, first_loss = min(losses.values()), next(iter(losses.values()))
    x = Axis(found.key.removeprefix("optimizer."), log_ticks(rates[0], rates[-1]), logarithmic=True)
    y = Axis("mean loss of the steps", ticks(least, min(max(losses.values()), max(least, HIGHEST_LOSS * first_loss))))
    plot = Plot(f"loss by learning rate, {counted(found.steps, 'steps')} each", x, y, RATES_WIDTH, RATES_HEIGHT)
    low, high = y.ticks[0], y.ticks[-1]
    first, last = (rates[i] for i in found.near)
    plot.band([(first, low), (last, low)], [(first, high), (last, high)], "near")
    plot.line([(found.proposal, low), (found.proposal, high)], "level")
    smooth = zip(rates, found.smooth, strict=True)
    plot.line([(rate, min(loss, high)) for rate, loss in smooth if isfinite(loss)], "curve rate")
    for rate, loss in losses.items():
        plot.marker(rate, min(loss, high), "rate", f"rate {rate:g}, loss {loss:.4g}", 2)
    right, down = plot.at(found.proposal, high)
    plot.text((right + 5, down + 12), f"{found.proposal:g}", "axis")
    return macro("plot.svg.j2", "alone")(plot)
