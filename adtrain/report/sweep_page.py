"""The page of a sweep: the ranking, the values of the members as parallel coordinates, and their learning curves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from math import isfinite, log10
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.config.differences import rounded_text, value_text
from adtrain.report.curves import Curve, Panel, alike, banded
from adtrain.report.plot import BOTTOM, TOP, Axis, Drawing, Point, log_ticks
from adtrain.report.runs_page import KINDS
from adtrain.sweeps.finished import finished_results, run_path
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import EpochLine, MemberResult, SweepResults
from adtrain.templates import environment
from adtrain.training import scores
from adtrain.training.progress import metric_of

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


def render(folder: SweepFolder, results: SweepResults, best_report: str | None) -> str:
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
        panels=panels(folder.lines(), results),
        best_report=best_report,
        counts={s: sum(x.status == s for x in results.members) for s in ("finished", "dropped", "failed")},
    )  # fmt: skip


def panels(lines: Sequence[EpochLine], results: SweepResults) -> list[Panel]:
    """The learning curves of the best settings: the mean over seeds, in a band from the smallest to the largest value.

    Members that differ in their seeds only are one curve.
    """
    drawn = [member for member in results.members if member.status != "failed"]
    by_setting = alike(drawn, lambda x: {key: value for key, value in x.values.items() if key != SEED})
    metric = results.rank_by.partition("_")[2]
    parts = ["validation", "train"] if any(x.validation for x in results.members) else ["train"]
    metrics = list(dict.fromkeys((metric, "loss")))
    best = sorted(by_setting, key=lambda same: _mean_key(same, results.higher))[:MAX_CURVES]
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


def beside(folder: SweepFolder, place: Path) -> str:
    """The page of a sweep for the folder `place`, from where it links to the report of the best member."""
    results = finished_results(folder)
    best = run_path(folder, results.members[0].member) / "report.html"
    return render(folder, results, os.path.relpath(best, place) if best.is_file() else None)
