"""The pages of a run, of several runs, and of a sweep: HTML files with styles, charts and images, without scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, log10
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import config
from adtrain.config.records import differences, rounded_text, value_text
from adtrain.metrics import ByClass
from adtrain.report import classes, functions, tables
from adtrain.report.plot import BOTTOM, TOP, Axis, Drawing, Point, log_ticks
from adtrain.report.predictions import AnyPredictions, FieldPredictions, Predictions, Sample, SolutionPredictions
from adtrain.report.record import Curve, Panel, Record, alike, banded, panels
from adtrain.report.tables import LabelPredictions, NumberPredictions
from adtrain.report.times import kernels, lanes, strip
from adtrain.sweeps.finished import finished_results, run_path
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import EpochLine, MemberResult, SweepResults
from adtrain.templates import environment
from adtrain.training import scores
from adtrain.training.progress import Epoch, Interval, metric_of
from adtrain.training.summary import model_text, speed_of

OF_ROWS = (Predictions, NumberPredictions, LabelPredictions)
"""Predictions for examples, which can be rows of a table."""

FIELDS = ("device", "device_name", "precision", "seed", "epochs", "steps", "batch_size", "ended")


def run_page(record: Record, predictions: AnyPredictions | str) -> str:
    """The page of a run. If there are no predictions, `predictions` is the reason."""
    summary = record.summary
    return environment().get_template("run.html.j2").render(
        title=f"{record.config.name}: {record.path}",
        record=record,
        missing=missing(record, predictions),
        tiles=_tiles(record),
        strip=strip(record.config, summary.ops if summary else ()),
        panels=panels(record),
        classes=classes if isinstance(predictions, Predictions) else None,
        numbers=tables if isinstance(predictions, NumberPredictions) else None,
        sample=predictions.text if isinstance(predictions, Sample) else None,
        solution=functions if isinstance(predictions, SolutionPredictions) else None,
        field=functions if isinstance(predictions, FieldPredictions) else None,
        labels=tables.by_label(predictions) if isinstance(predictions, LabelPredictions) else None,
        predictions=predictions,
        columns=predictions.columns if isinstance(predictions, OF_ROWS) else None,
        metrics=_metrics(summary.metrics) if summary else {},
        lanes=lanes(summary) if summary else None,
        step=kernels(summary) if summary else None,
        facts=_facts(record),
        config=config.dump(record.config),
    )  # fmt: skip


def missing(record: Record, predictions: AnyPredictions | str) -> list[str]:
    """One line for each part that this report lacks because the run is unfinished or there are no predictions."""
    found = []
    if record.summary is None:
        epochs = record.config.training.epochs
        status = f"{len(record.epochs)} {'' if epochs is None else f'of {epochs} '}epochs are complete"
        if (stopped := record.stopped) is not None:
            status += f", {stopped.reason.replace('_', ' ')} at step {stopped.step}"
        found.append(f"the run is not finished ({status}): no test result and no times")
    if isinstance(predictions, str):
        found.append(f"no predictions: {predictions}")
    return found


def results(split: str, score: scores.Score) -> list[tuple[str, str]]:
    """Names and values of a score, the loss last."""
    values = score._asdict()
    return [(f"{split} {name}", scores.value_text(name, values[name])) for name in scores.metrics_first(score._fields)]


def _tiles(record: Record) -> list[tuple[str, str]]:
    """The results in large print; for an unfinished run, the scores of its last epoch."""
    if (summary := record.summary) is not None:
        found = results("test", summary.test)
        if summary.baseline is not None:
            found.append(("most frequent class", f"{summary.baseline:.2%}"))
        found.append(("training", f"{summary.train_seconds:.1f} s"))
        if summary.images_per_second is not None:
            speed, unit = speed_of(record.config.data, summary.images_per_second)
            found.append((f"{unit}/s", f"{speed:,.0f}"))
        if summary.peak_share is not None:
            found.append(("of peak FLOP/s", f"{summary.peak_share:.0%}"))
        if (step := summary.step_ms) is not None:
            found.append(("step, median", f"{step.median:.2f} ms"))
        return [*found, ("parameters", f"{summary.parameters:,}")]
    scored = {split: getattr(record.epochs[-1], split) for split in ("train", "validation")} if record.epochs else {}
    return [tile for split, score in scored.items() if score is not None for tile in results(split, score)]


def _metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of `training.metrics`: single numbers, and a row for each class."""
    by_class, numbers = {}, list[tuple[str, str]]()
    for name, found in metrics.items():
        if isinstance(found, ByClass):
            by_class[name] = found.by_class
            numbers.append((f"{name} macro", scores.value_text(name, found.macro)))
        elif isinstance(found, float):
            numbers.append((name, scores.value_text(name, found)))
        elif isinstance(found, (list, tuple)):
            values = enumerate(found)
            numbers += [(f"{name}[{i}]", scores.value_text(name, x)) for i, x in values if isinstance(x, float)]
    names = dict.fromkeys(name for values in by_class.values() for name in values)
    rows = [
        [name, *(scores.value_text(metric, found[name]) if name in found else "" for metric, found in by_class.items())]
        for name in names
    ]
    return {"numbers": numbers, "columns": ["class", *by_class], "rows": rows} if numbers else {}


def _facts(record: Record) -> dict[str, Any]:
    summary, found = record.summary, {"folder": record.path}
    if summary is None:
        return found
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    facts = {name.replace("_", " "): getattr(summary, name) for name in FIELDS}
    weights = model_text(summary) or f"of epoch {summary.model_epoch}, the last"
    return {**found, **facts, "weights": weights, "versions": versions}


KINDS = ("series-2", "series-3", "series-5", "series-4", "series-6", "series-1")
"""CSS classes with the colours of the curves; further ones begin again."""


@dataclass(frozen=True)
class Source:
    """Where the curves of all runs come from.

    Attributes:
        unit: "epoch", or "step" if a run has no complete epoch.
        by_interval: whether there is a point for each interval of steps, because a run has few epochs.
        split: "validation" if the curves have points for epochs and all runs have this split, otherwise "train".
    """

    unit: str
    by_interval: bool
    split: str

    @classmethod
    def of(cls, records: Sequence[Record]) -> Source:
        epochs = all(record.epochs for record in records)
        by_interval = not epochs or any(record.by_interval for record in records)
        validated = not by_interval and all(line.validation for record in records for line in record.epochs)
        return cls("epoch" if epochs else "step", by_interval, "validation" if validated else "train")

    def points(self, record: Record, metric: str) -> dict[int, float]:
        """The metric by step."""
        lines: Sequence[Epoch | Interval] = record.intervals if self.by_interval else record.epochs
        return {line.step: getattr(getattr(line, self.split), metric) for line in lines}


@dataclass(frozen=True)
class Group:
    """Runs whose configs differ in nothing but name and seed."""

    name: str
    kind: str
    records: Sequence[Record]

    def curve(self, metric: str, source: Source) -> Curve | None:
        """The mean over the runs; see `banded`."""
        per_unit = self.records[0].steps_per_epoch if source.unit == "epoch" else 1
        return banded(self.name, self.kind, [source.points(record, metric) for record in self.records], per_unit)


def runs_page(records: Sequence[Record]) -> str:
    """The page of at least two runs."""
    differing = differences([_settings(record) for record in records])
    found = groups(records)
    metrics = dict.fromkeys(name for record in records if record.summary for name in record.summary.test._fields)
    return environment().get_template("runs.html.j2").render(
        title=f"{len(records)} runs",
        records=records,
        groups=found,
        metrics=scores.metrics_first(list(metrics)),
        value_text=scores.value_text,
        panels=panels_of_runs(found),
        differing={key: _runs_by_value(list(map(value_text, values)), records) for key, values in differing.items()},
    )  # fmt: skip


def _runs_by_value(values: Sequence[str], records: Sequence[Record]) -> list[tuple[str, str]]:
    """For each value the names of the runs that have it, and the value."""
    found: dict[str, list[str]] = {}
    for value, record in zip(values, records, strict=True):
        found.setdefault(value, []).append(record.path.name)
    return [(", ".join(names), value) for value, names in found.items()]


def groups(records: Sequence[Record]) -> list[Group]:
    """The runs by their configs without name and seed, in the order of their first runs."""

    def without_seed(record: Record) -> dict[str, Any]:
        settings = _settings(record)
        return {**settings, "training": {**settings["training"], "seed": None}}

    return [
        Group(
            f"{same[0].path.name} and {len(same) - 1} more" if len(same) > 1 else same[0].path.name,
            KINDS[i % len(KINDS)],
            same,
        )
        for i, same in enumerate(alike(records, without_seed))
    ]


def panels_of_runs(groups: Sequence[Group]) -> list[Panel]:
    """A chart for each metric that all runs have; empty if a run has completed no step."""
    records = [record for group in groups for record in group.records]
    source = Source.of(records)
    scored = [lines[0].train._fields for record in records if (lines := record.scored)]
    if len(scored) < len(records):
        return []
    found = []
    for name in [name for name in scored[0] if all(name in fields for fields in scored)]:
        curves = [curve for group in groups if (curve := group.curve(name, source)) is not None]
        if curves:
            title = f"{source.split} {name}"
            found.append(Panel(title, source.unit, curves, partial(scores.value_text, name)))
    return found


def _settings(record: Record) -> dict[str, Any]:
    settings: dict[str, Any] = record.config.model_dump(mode="json", exclude_none=True, exclude={"name"})
    return settings


MAX_LINES, MAX_CURVES = 400, 6
"""Members that are drawn as parallel coordinates, the best ones; settings whose learning curves are drawn."""
WIDTH, HEIGHT, SIDE = 760, 300, 60
TURNED_WIDTH, TURNED_ROW, TURNED_SIDE, TURNED_END = 360, 84, 8, 24
"""Parallel coordinates with horizontal axes: width, distance of axes, margin at the sides, and what the last axis needs
less."""
ROOM = 0.12
"""The share of an axis, at each end, in which only the end has a label."""
LEAST_RANGE = 5
"""The largest number is at least this multiple of the smallest one on a logarithmic axis."""
SEED = "training.seed"


class Coordinates(Drawing):
    """Parallel coordinates: an axis for each key and one for the metric, a line for each member.

    The axes run up, side by side; `turned` ones run to the right, one below the other, for narrow windows.
    """

    def __init__(self, results: SweepResults, turned: bool = False) -> None:
        members = [x for x in results.members if x.value is not None][:MAX_LINES]
        metric = results.rank_by.replace("_", " ")
        columns = [(key, [member.values[key] for member in members]) for key in members[0].values]
        columns.append((metric, [member.value for member in members]))
        size = (TURNED_WIDTH, TURNED_ROW * len(columns) - TURNED_END) if turned else (WIDTH, HEIGHT)
        super().__init__(f"the values of the members and their {metric}", *size)
        self.turned, self.axes = turned, len(columns)
        self.written = {metric: partial(scores.value_text, results.rank_by.partition("_")[2])}
        self.labels: list[tuple[Point, str, str, str]] = []
        shares = [self._axis(i, title, values) for i, (title, values) in enumerate(columns)]
        for rank in range(len(members) - 1, -1, -1):  # the best is drawn last, above the others
            kind = f"curve {KINDS[0]}" if rank == 0 else f"faint {KINDS[1]}"
            points = [self._at(i, of[rank]) for i, of in enumerate(shares)]
            self.stroke(points, kind, f"member {members[rank].member}")
        for label in self.labels:
            self.text(*label)

    def _axis(self, i: int, title: str, values: Sequence[Any]) -> list[float]:
        """Draw axis `i` with its ends; the position of each value on it, from 0 to 1."""
        self.stroke([self._at(i, 0), self._at(i, 1)], "grid")
        across, down = self._at(i, 0)
        at, anchor = ((across, down - 22), "start") if self.turned else ((across, HEIGHT - 8), "middle")
        self.labels.append((at, title, "name soft", anchor))
        numbers = [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) == len(values) and all(map(isfinite, numbers)):
            scale = Axis(
                "", (min(numbers), max(numbers)), self.written.get(title, "{:.4g}".format), is_logarithmic(numbers)
            )
            return self._numbers(i, scale, numbers)
        texts = [value_text(v, brief=True) for v in values]
        names = sorted(set(texts))
        places = {name: i / (len(names) - 1) if len(names) > 1 else 0.5 for i, name in enumerate(names)}
        for name, place in places.items():
            self._label(i, place, name)
        return [places[text] for text in texts]

    def _numbers(self, i: int, scale: Axis, numbers: Sequence[float]) -> list[float]:
        """Label the ends and, on a logarithmic axis, the powers of ten between them; the position of each number."""
        low, high = scale.ticks
        if low == high:
            self._label(i, 0.5, scale.text(low))
            return [0.5] * len(numbers)
        between = [x for x in log_ticks(low, high) if log10(x).is_integer()] if scale.logarithmic else []
        for x in (low, *between, high):
            share = scale.share(x)
            if x in (low, high) or ROOM < share < 1 - ROOM:
                self._label(i, share, scale.text(x))
        return [scale.share(x) for x in numbers]

    def _label(self, i: int, share: float, text: str) -> None:
        x, y = self._at(i, share)
        if self.turned:
            anchor = "start" if share == 0 else "end" if share == 1 else "middle"
            self.labels.append(((x, y - 8), text, "name", anchor))
        elif 0 < share < 1:
            self.labels.append(((x + 6, y + 4), text, "name", "start"))
        else:
            self.labels.append(((x, y + (-6 if share else 14)), text, "name", "middle"))

    def _at(self, i: int, share: float) -> Point:
        """The point at this share of axis `i`."""
        if self.turned:
            return TURNED_SIDE + share * (TURNED_WIDTH - 2 * TURNED_SIDE), TURNED_ROW * (i + 0.6)
        x = SIDE + i * (WIDTH - 2 * SIDE) / max(1, self.axes - 1)
        return x, TOP + 14 + (1 - share) * (HEIGHT - TOP - 14 - BOTTOM - 14)


def is_logarithmic(numbers: Sequence[float]) -> bool:
    """Whether numbers above 0 over a wide range are spread more evenly on a logarithmic axis than on a linear one."""
    low, high, middle = min(numbers), max(numbers), float(np.median(numbers))
    if low <= 0 or high < LEAST_RANGE * low:
        return False
    linear, logarithmic = (middle - low) / (high - low), log10(middle / low) / log10(high / low)
    return abs(logarithmic - 0.5) < abs(linear - 0.5)


def sweep_page(folder: SweepFolder, results: SweepResults, best_report: str | None) -> str:
    """The page of a finished sweep; `best_report` is the address of the report of the best member's run."""
    found = next((x.test or x.validation or x.train for x in results.members if x.train), None)
    names = scores.metrics_first(list(found._fields)) if found else []
    drawn = [x for x in results.members if x.value is not None]
    return environment().get_template("sweep.html.j2").render(
        title=f"Sweep {folder.path.name}",
        results=results,
        keys=list(results.members[0].values),
        names=names,
        value_text=scores.value_text,
        setting_text=partial(rounded_text, brief=True),
        rank_by=results.rank_by.replace("_", " "),
        metric=results.rank_by.partition("_")[2],
        coordinates=[Coordinates(results, turned).svg() for turned in (False, True)] if drawn else None,
        panels=panels_of_sweep(folder.lines(), results),
        best_report=best_report,
        counts={s: sum(x.status == s for x in results.members) for s in ("finished", "dropped", "failed")},
    )  # fmt: skip


def panels_of_sweep(lines: Sequence[EpochLine], results: SweepResults) -> list[Panel]:
    """The learning curves of the best settings: the mean over seeds, in a band from the smallest to the largest value.

    Members that differ in their seeds only are one curve.
    """
    drawn = [member for member in results.members if member.status != "failed"]
    by_setting = alike(drawn, lambda x: {key: value for key, value in x.values.items() if key != SEED})
    metric = results.rank_by.partition("_")[2]
    parts = ["validation", "train"] if any(x.validation for x in results.members) else ["train"]
    metrics = list(dict.fromkeys((metric, "loss")))
    best = sorted(by_setting, key=lambda same: _mean_key(same, results.higher_is_better))[:MAX_CURVES]
    found = []
    for split in parts:
        for name in metrics:
            curves = [
                curve
                for kind, same in zip(KINDS, best, strict=False)
                if (curve := _curve(lines, same, kind, split, name)) is not None
            ]
            if curves:
                found.append(Panel(f"{split} {name}", "epoch", curves, partial(scores.value_text, name)))
    return found


def _mean_key(same: Sequence[MemberResult], higher: bool) -> tuple[bool, float]:
    """Sorts settings by the mean of the metric over their finished members; those without one come last, by rank."""
    values = [x.value for x in same if x.status == "finished" and x.value is not None]
    if not values:
        return True, min(x.rank for x in same)
    mean = float(np.mean(values))
    return False, -mean if higher else mean


def _curve(lines: Sequence[EpochLine], same: Sequence[MemberResult], kind: str, split: str, name: str) -> Curve | None:
    found: dict[int, dict[int, float]] = {x.member: {} for x in same}
    for line in lines:
        for scored in line.members:
            if scored.member in found and (value := metric_of(scored, split, name)) is not None:
                found[scored.member][line.epoch] = value
    texts = {key.rpartition(".")[2]: rounded_text(x, brief=True) for key, x in same[0].values.items() if key != SEED}
    settings = ", ".join(f"{name} {text}" for name, text in texts.items())
    return banded(settings or "all seeds", kind, [points for points in found.values() if points])


def sweep_page_beside(folder: SweepFolder, place: Path) -> str:
    """The page of a sweep for the folder `place`, from where it links to the report of the best member."""
    results = finished_results(folder)
    best = run_path(folder, results.members[0].member) / "report.html"
    return sweep_page(folder, results, os.path.relpath(best, place) if best.is_file() else None)
