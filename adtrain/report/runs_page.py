"""The page of several runs: their results, the differences of their configs, and their learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from adtrain.config.differences import differences, value_text
from adtrain.report.curves import Curve, Panel, alike, banded
from adtrain.report.record import Record
from adtrain.templates import environment
from adtrain.training import scores
from adtrain.training.progress import Epoch, Interval

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


def render(records: Sequence[Record]) -> str:
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
        panels=panels(found),
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


def panels(groups: Sequence[Group]) -> list[Panel]:
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
