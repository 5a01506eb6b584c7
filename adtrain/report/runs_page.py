"""The page of several runs: their results, the differences of their configs, and their learning curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from adtrain.config.differences import differences, value_text
from adtrain.report.curves import Curve, Panel
from adtrain.report.record import Record
from adtrain.templates import environment
from adtrain.training import scores
from adtrain.training.metrics import Epoch, Interval

KINDS = ("series-2", "series-3", "series-5", "series-4", "series-6", "series-1")
"""CSS classes with the colours of the curves; further ones begin again."""


@dataclass(frozen=True)
class Group:
    """Runs whose configs differ in nothing but name and seed."""

    name: str
    kind: str
    records: Sequence[Record]

    def curve(self, metric: str, by_interval: bool) -> Curve | None:
        """The mean over the runs at the steps that all of them reached, with a band from the smallest to the largest
        value. None if there is no such step."""
        found = [_points(record, metric, by_interval) for record in self.records]
        steps = sorted(set.intersection(*map(set, found)))
        if not steps:
            return None
        values = np.array([[points[step] for step in steps] for points in found])
        band = [values.min(axis=0).tolist(), values.max(axis=0).tolist()] if len(found) > 1 else [[], []]
        xs = [step / self.records[0].steps_per_epoch for step in steps]
        return Curve(self.name, self.kind, xs, values.mean(axis=0).tolist(), *band)


def render(records: Sequence[Record]) -> str:
    """The page of at least two runs."""
    differing = differences([_settings(record) for record in records])
    found = groups(records)
    metrics = dict.fromkeys(name for record in records if record.summary for name in record.summary.test._fields)
    return (
        environment()
        .get_template("runs.html.j2")
        .render(
            title=f"{len(records)} runs",
            records=records,
            groups=found,
            metrics=scores.metrics_first(list(metrics)),
            value_text=scores.value_text,
            panels=panels(found),
            differing={key: list(map(value_text, values)) for key, values in differing.items()},
        )
    )


def groups(records: Sequence[Record]) -> list[Group]:
    """The runs by their configs without name and seed, in the order of their first runs."""
    found: dict[str, list[Record]] = {}
    for record in records:
        settings = _settings(record)
        settings["training"] = {**settings["training"], "seed": None}
        found.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(record)
    return [
        Group(
            f"{same[0].path.name} and {len(same) - 1} more" if len(same) > 1 else same[0].path.name,
            KINDS[i % len(KINDS)],
            same,
        )
        for i, same in enumerate(found.values())
    ]


def panels(groups: Sequence[Group]) -> list[Panel]:
    """A chart for each metric that is in all runs: of the validation split if all have one, otherwise of training."""
    records = [record for group in groups for record in group.records]
    by_interval = any(record.by_interval for record in records) or not all(record.epochs for record in records)
    unit = "epoch" if all(record.epochs for record in records) else "step"
    lines = [lines[0] for record in records if (lines := _lines(record, by_interval))]
    if len(lines) < len(records):
        return []
    names = [name for name in lines[0].train._fields if all(hasattr(line.train, name) for line in lines)]
    found = []
    for name in names:
        curves = [curve for group in groups if (curve := group.curve(name, by_interval)) is not None]
        if curves:
            found.append(Panel(name, unit, curves, partial(scores.value_text, name)))
    return found


def _lines(record: Record, by_interval: bool) -> Sequence[Epoch | Interval]:
    return record.intervals if by_interval else record.epochs


def _points(record: Record, metric: str, by_interval: bool) -> Mapping[int, float]:
    """The metric by step."""
    found = {}
    for line in _lines(record, by_interval):
        score = line.validation if isinstance(line, Epoch) and line.validation is not None else line.train
        found[line.step] = getattr(score, metric)
    return found


def _settings(record: Record) -> dict[str, Any]:
    settings: dict[str, Any] = record.config.model_dump(mode="json", exclude_none=True, exclude={"name"})
    return settings
