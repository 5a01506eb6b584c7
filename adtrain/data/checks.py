"""Warnings about data that can be read, but are hardly what was meant.

Classes have no training example, a column of a table gives away what is to be predicted, or float32 loses digits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from adtrain.data.errors import printable
from adtrain.data.file_array import FileArray
from adtrain.data.part import Columns
from adtrain.data.split import Images, Rows, Split
from adtrain.data.statistics import lossy_channels
from adtrain.text import counted, first_names, visible

_log = logging.getLogger(__name__)

FEW, MANY = 256, 4096
"""Rows that are looked at first. They rule out most columns."""

REPEATED = 4
"""Rows for each value of a column, from which on it is no chance that each value has one label."""

ROUNDING = 1e-6
"""The part of the largest deviation of a target that is rounding error."""


def warn_of_classes(classes: tuple[str, ...], train: Split, test: Split, place: str) -> None:
    """Warn about classes of which the training part has no example."""
    counts = np.bincount(train.labels, minlength=len(classes)) if classes else np.ones(0)
    if unseen := np.flatnonzero(counts == 0).tolist():
        names = first_names([printable(classes[i]) for i in unseen])
        kinds = "class" if len(unseen) == 1 else "classes"
        what = f"{counted(int(np.isin(test.labels, unseen).sum()), 'test examples')} of {kinds} {names}"
        _log.warning("adtrain: warning: %s: found %s, without a training example", visible(place), what)


def warn_of_leaks(columns: Columns | None, train: Split, place: str) -> None:
    """Warn about columns of a table, in a file of any format, that determine the label or target."""
    base = train.images.base if isinstance(train.images, Rows) else train.images
    if train.images.shape[2:] != (1, 1) or isinstance(base, FileArray):
        return
    for i, what in leaks(np.asarray(train.images)[:, :, 0, 0], train.labels):
        name = printable(str(i) if columns is None else columns.features[i].title)
        advice = "leave it out if it is not known at the time of a prediction"
        problem = f"column {name} leaks what is to be predicted: {what}"
        _log.warning("adtrain: warning: %s: %s; %s", visible(place), problem, advice)


def warn_of_lost_digits(images: Images, std: Sequence[float], features: Sequence[str], place: str) -> None:
    """Warn about channels whose numbers differ by less than float32 holds; `features` names those of a table."""
    if lossy := lossy_channels(images, std):
        names = [printable(features[i]) if features else str(i) for i in lossy]
        what = f"{'column' if features else 'channel'} {first_names(names)}"
        reason = "float32 loses the last digits of these numbers; data.normalize: true subtracts the mean first"
        _log.warning("adtrain: warning: %s: %s: %s", visible(place), what, reason)


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
