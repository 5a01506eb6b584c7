"""The sections of a run's page, as HTML."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.metrics import ByClass
from adtrain.report import parts
from adtrain.report.chart import chart
from adtrain.report.curves import Curve, Panel, panels
from adtrain.report.markup import Markup, html, join
from adtrain.report.parts import bar, breakable, table
from adtrain.report.pixels import png, shown
from adtrain.report.predictions import Predictions
from adtrain.report.record import Record
from adtrain.training import scores
from adtrain.training.summary import OperationTime, Summary

MOST_CLASSES = 25
"""The most classes of a confusion matrix on the page."""

CLASS_COLUMNS = {"class": "text", "images": "", "accuracy": "", "mistakes": "", "most often taken for": "text"}
OPERATION_COLUMNS = {
    "operation": "text",
    "layer": "text",
    "phase": "left minor",
    "ms": "",
    "share": "",
    "GFLOP/s": "minor",
    "GB/s": "minor",
}
"""Titles and CSS classes: `text` is aligned left and can wrap, `minor` is hidden on narrow screens."""

MOST_PICTURES = 24
MOST_OPERATIONS = 15


def tiles(record: Record) -> Markup:
    """The results in large print; for an unfinished run, the scores of its last epoch."""
    found: list[tuple[str, str]] = []
    if (summary := record.summary) is not None:
        found += [
            *_results("test", summary.test),
            ("training", f"{summary.train_seconds:.1f} s"),
        ]
        if (speed := summary.images_per_second) is not None:
            found.append(("images/s", f"{speed:,.0f}"))
        if (step := summary.step_ms) is not None:
            found.append(("step, median", f"{step.median:.2f} ms"))
        found.append(("parameters", f"{summary.parameters:,}"))
    elif record.epochs:
        for split in ("train", "validation"):
            if (score := getattr(record.epochs[-1], split)) is not None:
                found += _results(split, score)
    return parts.tiles(found)


def _results(split: str, score: scores.Score) -> list[tuple[str, str]]:
    """Titles and values of a score, the loss last."""
    values = score._asdict()
    return [(f"{split} {name}", scores.value_text(name, values[name])) for name in scores.metrics_first(score._fields)]


def learning_curves(record: Record) -> Markup:
    drawn = join(html("<figure>{}{}</figure>\n", _legend(panel), chart(panel)) for panel in panels(record))
    if not drawn:
        return Markup("<p>No epoch is complete.</p>\n")
    note = "Training scores are means over an epoch, while the weights change; the faint line shows shorter intervals."
    return html('<div class="curves">\n{}</div>\n{}', drawn, parts.note(note))


def _legend(panel: Panel) -> str:
    def entry(curve: Curve) -> Markup:
        name = "at the end" if curve.name == panel.title else curve.name
        return parts.key(curve.split, html("{} <b>{}</b>", name, panel.format_value(curve.values[-1])))

    keys = join((entry(curve) for curve in panel.curves if curve.name), " ")
    return html("<figcaption><strong>{}</strong>{}</figcaption>", panel.title, keys)


def confusion(predictions: Predictions) -> Markup:
    counts, classes = predictions.confusion, predictions.classes
    total = f"{predictions.correct:,} of {len(predictions.labels):,} test images are classified correctly"
    if len(classes) > MOST_CLASSES:
        return html(
            "<p>{}. The matrix of {} classes is too large for a page; --png draws it.</p>\n", total, len(classes)
        )
    most = max(int((counts - np.diag(np.diag(counts))).max()), 1)

    def cell(row: int, column: int) -> Markup:
        count = int(counts[row, column])
        if row == column:
            return html('<td class="right">{}</td>', count)
        if not count:
            return Markup("<td></td>")
        tooltip = f"{count} of {classes[row]} taken for {classes[column]}"
        return html('<td class="wrong" style="--share:{:.3f}" title="{}">{}</td>', count / most, tooltip, count)

    head = join(html('<th scope="col">{}</th>', name) for name in classes)
    rows = join(
        html('<tr><th scope="row">{}</th>{}</tr>\n', name, join(cell(i, j) for j in range(len(classes))))
        for i, name in enumerate(classes)
    )
    kind = "confusion named" if max(map(len, classes)) > 3 else "confusion"
    matrix = html('<table class="{}"><thead><tr><td></td>{}</tr></thead><tbody>\n{}</tbody></table>', kind, head, rows)
    note = f"{total}. Rows are labels, columns are predictions; a deeper orange means more mistakes."
    return html('<div class="wide">{}</div>\n{}', matrix, parts.note(note))


def by_class(predictions: Predictions) -> Markup:
    """A row for each class, the least accurate first."""
    counts, classes = predictions.confusion, predictions.classes
    images = counts.sum(axis=1)
    wrong = images - np.diag(counts)
    accuracy = 1 - wrong / np.maximum(images, 1)
    order = [int(i) for i in np.argsort(accuracy, kind="stable") if images[i]]
    rows = []
    for i in order[:MOST_CLASSES]:
        others = np.where(np.arange(len(classes)) == i, 0, counts[i])
        mistaken = int(others.argmax())
        most = f"{classes[mistaken]} ({others[mistaken]})" if wrong[i] else ""
        share = wrong[i] / max(int(wrong.max()), 1)
        mistakes = bar(share, f"{wrong[i]:,}")
        rows.append([classes[i], f"{images[i]:,}", f"{accuracy[i]:.2%}", mistakes, most])
    left_out = len(order) - len(rows)
    note = f"{left_out} classes with higher accuracy are left out."
    return table(CLASS_COLUMNS, rows) + (parts.note(note) if left_out else "")


def named_metrics(metrics: Mapping[str, Any]) -> Markup:
    """The metrics of `training.metrics`: single numbers in large print, and a row for each class."""
    by_class = {name: found.by_class for name, found in metrics.items() if isinstance(found, ByClass)}
    single = parts.tiles(
        (f"{name} macro", scores.value_text(name, found.macro))
        if isinstance(found, ByClass)
        else (name, scores.value_text(name, found))
        for name, found in metrics.items()
        if isinstance(found, (float, ByClass))
    )
    if not by_class:
        return single
    classes = dict.fromkeys(name for values in by_class.values() for name in values)
    columns = {"class": "text", **dict.fromkeys(by_class, "")}
    rows = [
        [
            name,
            *(scores.value_text(metric, values[name]) if name in values else "" for metric, values in by_class.items()),
        ]
        for name in classes
    ]
    return single + table(columns, rows)


def worst_mistakes(predictions: Predictions) -> Markup:
    mistakes = predictions.worst(MOST_PICTURES)
    if not mistakes:
        return Markup("<p>There are no mistakes.</p>\n")
    if not predictions.pictured:
        return html("<p>The data are rows of {} numbers and have no pictures.</p>\n", predictions.images.shape[1])
    figures = []
    pictures = shown(predictions.images[[mistake.image for mistake in mistakes]])
    for (image, label, prediction, probability), pixels in zip(mistakes, pictures, strict=True):
        uri = f"data:image/png;base64,{b64encode(png(pixels)).decode()}"
        figures.append(
            html(
                '<figure><img src="{0}" alt="test image {1}" title="test image {1}">'
                "<figcaption><b>{2}</b> taken for <b>{3}</b><br>{4:.1%}</figcaption></figure>\n",
                *(uri, image, predictions.classes[label], predictions.classes[prediction], probability),
            )
        )
    note = "The mistakes with the highest probabilities. A picture's tooltip is its index in the test set."
    return html('<div class="mistakes">\n{}</div>\n{}', join(figures), parts.note(note))


def operations(summary: Summary) -> Markup:
    """The times of a step's phases and operations."""
    if not summary.ops:
        return Markup("<p>The operations were not timed (--profile-steps 0).</p>\n")
    ops = sorted(summary.ops, key=lambda row: -row.ms)
    top, rest = ops[:MOST_OPERATIONS], ops[MOST_OPERATIONS:]
    phases = {phase: sum(row.ms for row in ops if row.phase == phase) for phase in _phases(ops)}
    whole = sum(phases.values()) or 1.0
    strip = join(html('<i class="{}" style="--share:{:.4f}"></i>', phase, ms / whole) for phase, ms in phases.items())
    keys = join(
        (parts.key(phase, html("{} <b>{:.3f} ms</b> {:.0%}", phase, ms, ms / whole)) for phase, ms in phases.items()),
        " ",
    )
    rows = [
        [
            breakable(row.op),
            breakable(row.scope),
            row.phase,
            bar(row.ms / (top[0].ms or 1.0), f"{row.ms:.3f}"),
            f"{row.share:.1%}",
            _rate(row.gflops_per_s),
            _rate(row.gbytes_per_s),
        ]
        for row in top
    ]
    if rest:
        ms, share = (sum(getattr(row, field) for row in rest) for field in ("ms", "share"))
        rows.append([f"{len(rest)} more", "", "", f"{ms:.3f}", f"{share:.1%}", "", ""])
    note = f"Operations of one step: {sum(row.ms for row in ops):.3f} ms"
    note += f", {summary.ops_to_step_ratio:.1%} of a step without hooks." if summary.ops_to_step_ratio else "."
    listed = table(OPERATION_COLUMNS, rows, "operations")
    return html('<div class="stack">{}</div>\n<p class="keys">{}</p>\n{}{}', strip, keys, listed, parts.note(note))


def _phases(ops: Iterable[OperationTime]) -> Sequence[str]:
    """The phases of the operations, in the order of a step."""
    found = {row.phase for row in ops}
    return [phase for phase in ("forward", "backward", "update") if phase in found]


def _rate(value: float | None) -> str:
    return f"{value:.1f}" if value else ""
