"""The pictures of a run as PNG files, by matplotlib, which is imported only when needed."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.core.errors import AdtrainError
from adtrain.files import unwritable, write_atomic
from adtrain.report.curves import panels
from adtrain.report.numbers import MOST_TARGETS, NumberPredictions
from adtrain.report.pixels import shown
from adtrain.report.predictions import AnyPredictions, Predictions
from adtrain.report.record import Record
from adtrain.table import shorten
from adtrain.text import visible

COLOURS = {"train": "#2766c8", "rate": "#2766c8", "validation": "#d9661a"}
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#5d6878",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e1e5eb",
    "text.color": "#1d2430",
    "axes.labelcolor": "#1d2430",
    "xtick.color": "#5d6878",
    "ytick.color": "#5d6878",
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar sign in a name is not markup
}
DPI = 200
COLUMNS, MOST_PICTURES = 6, 18
MOST_COUNTED = 25
"""A confusion matrix of more classes has no room for counts in its squares."""


def check() -> None:
    """Raise AdtrainError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise AdtrainError("drawing PNG files needs matplotlib; pip install 'adtrain[report]'") from error


def write(record: Record, predictions: AnyPredictions | str, folder: Path) -> list[Path]:
    """Draw all available pictures into the folder, creating it if needed, and return their paths.

    Raises AdtrainError where matplotlib is missing, or a file cannot be written.
    """
    check()
    from matplotlib import style

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    drawings: dict[str, Callable[[], Any]] = {}
    if record.epochs:
        drawings["learning_curves.png"] = lambda: learning_curves(record)
    if isinstance(predictions, Predictions):
        drawings["confusion_matrix.png"] = lambda: confusion_matrix(predictions)
        if predictions.pictured and predictions.worst(1):
            drawings["worst_mistakes.png"] = lambda: worst_mistakes(predictions)
    if isinstance(predictions, NumberPredictions):
        drawings["predicted_against_true.png"] = lambda: scatter(predictions, residuals=False)
        drawings["residuals.png"] = lambda: scatter(predictions, residuals=True)
    for name, draw in drawings.items():
        content = BytesIO()
        with style.context(["default", STYLE]):
            draw().savefig(content, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.15)
        write_atomic(folder / name, content.getvalue())
    return [folder / name for name in drawings]


def learning_curves(record: Record) -> Any:
    """Loss, metrics and learning rate over the epochs, side by side, as a matplotlib Figure."""
    from matplotlib.figure import Figure

    charts = panels(record)
    figure = Figure(figsize=(4.4 * len(charts), 3.6), layout="constrained")
    figure.suptitle(record.config.name, fontweight="bold")
    for axes, panel in zip(figure.subplots(1, len(charts)), charts, strict=True):
        for curve in panel.curves:
            faint: dict[str, Any] = {"lw": 1, "alpha": 0.35}
            named: dict[str, Any] = {"lw": 2, "marker": "o" if curve.marked else "", "ms": 5, "clip_on": False}
            named["label"] = f"{curve.name} {panel.format_value(curve.values[-1])}"
            axes.plot(curve.epochs, curve.values, color=COLOURS[curve.split], **(named if curve.name else faint))
        xs, ys = panel.ticks()
        axes.set_xticks(xs)
        axes.set_yticks(ys, [panel.format_tick(y) for y in ys])
        axes.set(title=panel.title, xlabel="epoch", xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]))
        if len(panel.curves) > 1:
            axes.legend()
    return figure


def confusion_matrix(predictions: Predictions) -> Any:
    """Labels (rows) against predictions (columns), mistakes in orange, as a matplotlib Figure."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    counts, classes = predictions.confusion, predictions.classes
    mistakes = np.where(np.eye(len(classes), dtype=bool), 0, counts)
    side = min(max(5.5, 1.5 + 0.55 * len(classes)), 14)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(mistakes, cmap=LinearSegmentedColormap.from_list("mistakes", ["#ffffff", "#f08228"]), vmin=0)
    axes.grid(False)
    borders = np.arange(len(classes) + 1) - 0.5
    axes.set_xticks(borders, minor=True)
    axes.set_yticks(borders, minor=True)
    axes.grid(which="minor")
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    accuracy = predictions.correct / len(predictions.labels)
    axes.set(xlabel="prediction", ylabel="label", title=f"{accuracy:.2%} of {len(predictions.labels):,} correct")
    if len(classes) <= MOST_COUNTED:
        names = [shorten(visible(name), 14) for name in classes]
        upright = max(map(len, names)) <= 3
        axes.set_xticks(range(len(classes)), names, rotation=0 if upright else 45, ha="center" if upright else "right")
        axes.set_yticks(range(len(classes)), names)
        for i, j in zip(*np.nonzero(counts), strict=True):
            correct: dict[str, Any] = {"color": COLOURS["train"], "fontweight": "bold"} if i == j else {}
            axes.text(j, i, str(counts[i, j]), ha="center", va="center", fontsize=10, **correct)
    return figure


def scatter(predictions: NumberPredictions, residuals: bool) -> Any:
    """Predicted against true numbers, or residuals against predicted ones, for each target, as a matplotlib Figure."""
    from matplotlib.figure import Figure

    names, rows = predictions.targets[:MOST_TARGETS], predictions.points()
    figure = Figure(figsize=(4.4 * len(names), 4.0), layout="constrained")
    for i, (axes, name) in enumerate(zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True)):
        true, predicted = predictions.true[rows, i], predictions.predicted[rows, i]
        xs, ys = (predicted, true - predicted) if residuals else (true, predicted)
        axes.axline((xs[0], 0.0) if residuals else (xs[0], xs[0]), slope=0 if residuals else 1, color="#d9661a", lw=1)
        axes.plot(xs, ys, "o", color=COLOURS["train"], ms=3, alpha=0.6)
        labels = ("predicted", "true - predicted") if residuals else ("true", "predicted")
        axes.set(title=shorten(visible(name), 30), xlabel=labels[0], ylabel=labels[1])
    return figure


def worst_mistakes(predictions: Predictions) -> Any:
    """The misclassified images with the highest probabilities, as a matplotlib Figure."""
    from matplotlib.figure import Figure

    mistakes = predictions.worst(MOST_PICTURES)
    rows = -(-len(mistakes) // COLUMNS)
    figure = Figure(figsize=(1.75 * COLUMNS, 2.3 * rows), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for panel in axes:
        panel.axis("off")
    pictures = shown(predictions.images[[mistake.image for mistake in mistakes]])
    for panel, (_, label, prediction, probability), pixels in zip(axes, mistakes, pictures, strict=False):
        panel.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        names = visible(predictions.classes[label]), visible(predictions.classes[prediction])
        panel.set_title(f"{names[0]} as {names[1]}\n{probability:.1%}", fontsize=10)
    return figure
