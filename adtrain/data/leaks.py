"""Columns of a table that give away what is to be predicted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

FEW, MANY = 256, 4096
"""Rows that are looked at first. They rule out most columns."""

REPEATED = 4
"""Rows for each value of a column, from which on it is no chance that each value has one label."""

ROUNDING = 1e-6
"""The part of the largest deviation of a target that is rounding error."""


def leaks(features: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, str]]:
    """The columns of features (N, columns) that determine the label, with what was found; NaN is an empty cell.

    Labels are class numbers (N,), or numbers to predict (N, targets). Of classes a column gives the label away if each
    of its values has one label and values repeat; of numbers if it is one of them times a factor plus a constant.
    """
    if labels.ndim == 2:
        for target in labels.T:
            likely = np.flatnonzero(_are_linear(features[:FEW], target[:FEW]))
            for i in likely[_are_linear(features[:, likely], target)].tolist():
                yield i, "it is a target times a factor plus a constant"
        return
    ordered = np.sort(features[:FEW], axis=0)
    for i in np.flatnonzero((ordered[1:] == ordered[:-1]).any(axis=0)).tolist():
        few = _values_with_one_label(features[:MANY, i], labels[:MANY])
        if count := few and _values_with_one_label(features[:, i], labels):
            yield i, f"each of its {count:,} values has only one label"


def _values_with_one_label(values: np.ndarray, labels: np.ndarray) -> int:
    """The number of different values if each has one label only and they repeat; otherwise 0."""
    different, codes = np.unique(values, return_inverse=True)
    if len(different) < 2 or REPEATED * len(different) > len(values):
        return 0
    last = np.zeros(len(different), labels.dtype)
    last[codes] = labels
    return len(different) if len(np.unique(labels)) > 1 and np.array_equal(last[codes], labels) else 0


def _are_linear(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """For each column whether the target is a factor times it plus a constant, and has three different numbers."""
    filled = ~np.isnan(features)
    count = np.maximum(filled.sum(axis=0), 1)
    x = features - features.sum(axis=0, where=filled) / count
    y = target[:, np.newaxis] - (filled * target[:, np.newaxis]).sum(axis=0) / count
    squares = np.square(x).sum(axis=0, where=filled)
    factor = (x * y).sum(axis=0, where=filled) / np.where(squares > 0, squares, 1)
    largest = np.abs(y).max(axis=0, where=filled, initial=0)
    error = np.abs(y - factor * x).max(axis=0, where=filled, initial=0)
    found: np.ndarray = (error <= ROUNDING * largest) & (largest > 0) & (2 * count > len(target))
    return found & (len(np.unique(target)) > 2)
