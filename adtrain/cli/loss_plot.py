"""The curve of the loss in the terminal: `adtrain train --plot`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TypeAlias

from adtrain.training.progress import Epoch, Interval, Line, Validated

Points: TypeAlias = Sequence[tuple[int, float]]
"""Pairs of a step and a loss."""

HEIGHT = 12
MARKS = {"training": ".", "validation": "o"}


def losses(lines: Sequence[Line]) -> dict[str, Points]:
    """The losses by part of the data, from the lines of metrics.jsonl. Those of the training are of intervals."""
    found = defaultdict[str, list[tuple[int, float]]](list)
    for x in lines:
        if isinstance(x, Interval):
            found["training"].append((x.step, x.train.loss))
        elif isinstance(x, Epoch | Validated) and x.validation is not None:
            found["validation"].append((x.step, x.validation.loss))
    return {name: found[name] for name in MARKS if found[name]}


def plot(curves: Mapping[str, Points], width: int) -> list[str]:
    """The lines of a picture of curves. A column shows the mean of the losses at its steps."""
    curves = {name: [(step, y) for step, y in points if isfinite(y)] for name, points in curves.items()}
    points = [point for found in curves.values() for point in found]
    if not points:
        return []
    last, low, high = max(step for step, _ in points), min(y for _, y in points), max(y for _, y in points)
    labels = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 1)
    rows = [[" "] * columns for _ in range(HEIGHT)]
    for name, found in curves.items():
        by_column = defaultdict[int, list[float]](list)
        for step, y in found:
            by_column[min(step * columns // (last + 1), columns - 1)].append(y)
        for column, ys in by_column.items():
            height = (sum(ys) / len(ys) - low) / (high - low or 1.0)
            rows[round((1 - height) * (HEIGHT - 1))][column] = MARKS[name]
    shown = [f"{labels.get(i, ''):>{margin}} |{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    axis = f"{' ' * margin} +{'-' * columns}"
    end = f"{last:,} steps"
    legend = ", ".join(f"{MARKS[name]} {name}" for name, found in curves.items() if found)
    return ["loss", *shown, axis, f"{legend}{end:>{max(width - len(legend), len(end) + 1)}}"]
