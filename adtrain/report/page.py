"""The report of a run as a self-contained HTML file: it embeds styles, charts and images, and has no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from adtrain import config
from adtrain.report import parts, sections
from adtrain.report.predictions import Predictions
from adtrain.report.record import Record


def render(record: Record, predictions: Predictions | str) -> str:
    """The page of a run. If there are no predictions, `predictions` is the reason."""
    return parts.document(f"{record.config.name}: {record.path}", "".join(_body(record, predictions)))


def missing(record: Record, predictions: Predictions | str) -> list[str]:
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


def _body(record: Record, predictions: Predictions | str) -> Iterator[str]:
    cfg = record.config
    about = [cfg.data.dataset or str(cfg.data.path), cfg.optimizer.kind, f"seed {cfg.training.seed}"]
    if record.summary is not None:
        about.append(f"{record.summary.device}, {record.summary.device_name}")
    yield f"<header><h1>{escape(cfg.name)}</h1><p>{escape(' · '.join(about))}</p></header>\n"
    for line in missing(record, predictions):
        yield f'<p class="notice">{escape(line[0].upper() + line[1:])}.</p>\n'
    yield sections.tiles(record)
    yield parts.section("Learning curves", sections.learning_curves(record))
    if isinstance(predictions, Predictions):
        yield parts.section("Confusion matrix", sections.confusion(predictions))
        yield parts.section("Classes", sections.by_class(predictions))
        yield parts.section("Worst mistakes", sections.worst_mistakes(predictions))
    if record.summary is not None:
        yield parts.section("Where the time went", sections.operations(record.summary))
    yield parts.section("What was run", _what_was_run(record))


def _what_was_run(record: Record) -> str:
    rows: Mapping[str, Any] = {"folder": record.path}
    if (summary := record.summary) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
        fields = ("device", "device_name", "precision", "seed", "epochs", "steps", "batch_size", "ended", "model_epoch")
        rows = {**rows, **{field.replace("_", " "): getattr(summary, field) for field in fields}, "versions": versions}
    return f"{parts.facts(rows)}<pre>{escape(config.dump(record.config))}</pre>\n"
