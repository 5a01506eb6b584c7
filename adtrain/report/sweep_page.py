"""The page of a sweep: the ranking, the values of the members as parallel coordinates, and their learning curves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from math import isfinite, log
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.config.differences import rounded_text, value_text
from adtrain.report.curves import Curve, Panel, alike, banded
from adtrain.report.plot import BOTTOM, TOP, Drawing, Shape
from adtrain.report.runs_page import KINDS
from adtrain.sweeps.finished import finished_results, run_path
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import EpochLine, MemberResult, SweepResults
from adtrain.templates import environment
from adtrain.training import scores

MAX_LINES, MAX_CURVES = 400, 6
"""Members that are drawn as parallel coordinates, the best ones; settings whose learning curves are drawn."""
WIDTH, HEIGHT, SIDE = 760, 300, 60
SEED = "training.seed"


class Coordinates(Drawing):
    """Parallel coordinates: an axis for each key and one for the metric, a line for each member."""

    def __init__(self, results: SweepResults) -> None:
        super().__init__(f"the values of the members and their {results.rank_by.replace('_', ' ')}", WIDTH, HEIGHT)
        members = [x for x in results.members if x.value is not None][:MAX_LINES]
        keys = list(members[0].values)
        columns = [(key, [member.values[key] for member in members]) for key in keys]
        columns.append((results.rank_by.replace("_", " "), [member.value for member in members]))
        xs = [SIDE + i * (WIDTH - 2 * SIDE) / max(1, len(columns) - 1) for i in range(len(columns))]
        shares = [self._axis(x, title, values) for x, (title, values) in zip(xs, columns, strict=True)]
        for rank in range(len(members) - 1, -1, -1):  # the best is drawn last, above the others
            kind = f"curve {KINDS[0]}" if rank == 0 else f"faint {KINDS[1]}"
            points = [(x, self._down(of[rank])) for x, of in zip(xs, shares, strict=True)]
            self.stroke(points, kind, f"member {members[rank].member}")

    def _axis(self, x: float, title: str, values: Sequence[Any]) -> list[float]:
        """Draw an axis with its ends; the position of each value on it, from 0 to 1."""
        down = f"M{x:.1f} {self._down(0):.1f}V{self._down(1):.1f}"
        self.shapes.append(Shape("path", "grid", {"d": down}))
        self.text((x, HEIGHT - 8), title, "axis", "middle")
        numbers = [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) == len(values) and all(map(isfinite, numbers)):
            low, high = min(numbers), max(numbers)
            for at, value in ((0.0, low), (1.0, high)):
                self.text((x, self._down(at) + (14 if at == 0 else -6)), f"{value:.4g}", "axis", "middle")
            logarithmic = low > 0 and high / low >= 100
            shown = [log(v) for v in numbers] if logarithmic else numbers
            first, last = min(shown), max(shown)
            return [(x - first) / (last - first) if last > first else 0.5 for x in shown]
        texts = [value_text(v, brief=True) for v in values]
        names = sorted(set(texts))
        places = {name: i / max(1, len(names) - 1) if len(names) > 1 else 0.5 for i, name in enumerate(names)}
        for name, place in places.items():
            self.text((x, self._down(place) - 4), name, "axis", "middle")
        return [places[text] for text in texts]

    def _down(self, share: float) -> float:
        return TOP + 14 + (1 - share) * (HEIGHT - TOP - 14 - BOTTOM - 14)


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
        coordinates=Coordinates(results).svg() if drawn else None,
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
            score = getattr(scored, split)
            values = {**(scored.metrics if split == "validation" else {}), **(score._asdict() if score else {})}
            if scored.member in found and name in values:
                found[scored.member][line.epoch] = values[name]
    texts = {key.rpartition(".")[2]: rounded_text(x, brief=True) for key, x in same[0].values.items() if key != SEED}
    settings = ", ".join(f"{name} {text}" for name, text in texts.items())
    return banded(settings or "all seeds", kind, [points for points in found.values() if points])


def beside(folder: SweepFolder, place: Path) -> str:
    """The page of a sweep for the folder `place`, from where it links to the report of the best member."""
    results = finished_results(folder)
    best = run_path(folder, results.members[0].member) / "report.html"
    return render(folder, results, os.path.relpath(best, place) if best.is_file() else None)
