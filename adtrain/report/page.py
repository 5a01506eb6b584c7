"""The report of a run as a self-contained HTML file: it embeds styles, charts and images, and has no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain import config
from adtrain.report import numbers, parts, sections
from adtrain.report.markup import Markup, html, join
from adtrain.report.numbers import LabelPredictions, NumberPredictions
from adtrain.report.predictions import AnyPredictions, Predictions
from adtrain.report.record import Record


def render(record: Record, predictions: AnyPredictions | str) -> str:
    """The page of a run. If there are no predictions, `predictions` is the reason."""
    return parts.document(f"{record.config.name}: {record.path}", join(_body(record, predictions)))


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


def _body(record: Record, predictions: AnyPredictions | str) -> Iterator[Markup]:
    cfg = record.config
    source = cfg.data.dataset.kind if cfg.data.dataset else str(cfg.data.path)
    about = [source, cfg.optimizer.kind, f"seed {cfg.training.seed}"]
    if record.summary is not None:
        about.append(f"{record.summary.device}, {record.summary.device_name}")
    yield html("<header><h1>{}</h1><p>{}</p></header>\n", cfg.name, " · ".join(about))
    for line in missing(record, predictions):
        yield html('<p class="notice">{}.</p>\n', line[0].upper() + line[1:])
    yield sections.tiles(record)
    yield parts.section("Learning curves", sections.learning_curves(record))
    if isinstance(predictions, Predictions):
        yield parts.section("Confusion matrix", sections.confusion(predictions))
        yield parts.section("Classes", sections.by_class(predictions))
        yield parts.section("Worst mistakes", sections.worst_mistakes(predictions))
    if record.summary is not None and record.summary.metrics:
        yield parts.section("Metrics", sections.named_metrics(record.summary.metrics))
    if isinstance(predictions, NumberPredictions):
        yield parts.section("Targets", numbers.by_target(predictions))
        yield parts.section("Predicted against true", numbers.predicted_against_true(predictions))
        yield parts.section("Residuals", numbers.residuals(predictions))
    if isinstance(predictions, LabelPredictions):
        yield parts.section("Labels", numbers.by_label(predictions))
    if record.summary is not None:
        yield parts.section("Where the time went", sections.operations(record.summary))
    yield parts.section("What was run", _what_was_run(record))


def _what_was_run(record: Record) -> Markup:
    rows: Mapping[str, Any] = {"folder": record.path}
    if (summary := record.summary) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
        fields = ("device", "device_name", "precision", "seed", "epochs", "steps", "batch_size", "ended", "model_epoch")
        rows = {**rows, **{field.replace("_", " "): getattr(summary, field) for field in fields}, "versions": versions}
    return html("{}<pre>{}</pre>\n", parts.facts(rows), config.dump(record.config))
