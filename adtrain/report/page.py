"""The report of a run as a self-contained HTML file: it embeds styles, charts and images, and has no scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adtrain import config
from adtrain.metrics import ByClass
from adtrain.report import classes, functions, tables
from adtrain.report.curves import panels
from adtrain.report.predictions import AnyPredictions, FieldPredictions, Predictions, Sample, SolutionPredictions
from adtrain.report.record import Record
from adtrain.report.tables import LabelPredictions, NumberPredictions
from adtrain.report.times import kernels, lanes, strip
from adtrain.templates import environment
from adtrain.training import scores
from adtrain.training.summary import model_text, speed_of

OF_ROWS = (Predictions, NumberPredictions, LabelPredictions)
"""Predictions for examples, which can be rows of a table."""

FIELDS = ("device", "device_name", "precision", "seed", "epochs", "steps", "batch_size", "ended")


def render(record: Record, predictions: AnyPredictions | str) -> str:
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
        status = f"{len(record.epochs)} of {record.config.training.epochs} epochs are complete"
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
