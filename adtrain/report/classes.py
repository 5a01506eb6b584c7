"""What a page shows of predicted classes: confusion matrix, a row for each class, pictures of the worst mistakes."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adtrain.metrics import class_counts
from adtrain.report.predictions import Predictions

MOST_CLASSES = 25
"""The most classes of a confusion matrix on the page, and of a list."""

MOST_PICTURES, MOST_FILTERS = 24, 32
CANDIDATES = 3
"""The classes that are shown of a mistake."""

POSITIVE, NEGATIVE = np.array([39.0, 102.0, 200.0]), np.array([217.0, 102.0, 26.0])
"""RGB of the largest weights above and below 0."""


class Cell(NamedTuple):
    """A cell of the confusion matrix. `share` is its part of the most common mistake, or of the class if correct."""

    images: int
    correct: bool
    share: float
    tooltip: str


class ClassRow(NamedTuple):
    """The test examples of a class.

    `accuracy` is its recall, `mistaken` names the class that it is most often taken for, and how often.
    """

    name: str
    images: int
    accuracy: float
    wrong: int
    share: float
    mistaken: str


class Candidate(NamedTuple):
    name: str
    probability: float
    correct: bool


class Picture(NamedTuple):
    """A mistake. `address` is empty if the data are not pictures, `image` its index in the test set.

    `values` are the names and values of columns, if it is a row of a table.
    """

    address: str
    image: int
    candidates: Sequence[Candidate]
    values: Sequence[tuple[str, str]]


def confusion(predictions: Predictions) -> list[list[Cell]]:
    """The cells by label (row) and prediction (column)."""
    counts, classes = predictions.confusion, predictions.classes
    most, totals = max(int(_mistakes(counts).max()), 1), np.maximum(counts.sum(axis=1), 1)

    def cell(row: int, column: int) -> Cell:
        count = int(counts[row, column])
        share = count / (int(totals[row]) if row == column else most)
        return Cell(count, row == column, share, f"{count:,} of {classes[row]} taken for {classes[column]}")

    return [[cell(i, j) for j in range(len(classes))] for i in range(len(classes))]


def most_confused(predictions: Predictions) -> list[tuple[str, str, int]]:
    """The most common mistakes: label, prediction, count."""
    counts, classes = _mistakes(predictions.confusion), predictions.classes
    order = np.argsort(-counts, axis=None, kind="stable")[:MOST_CLASSES]
    found = zip(*np.unravel_index(order, counts.shape), strict=True)
    return [(classes[i], classes[j], int(counts[i, j])) for i, j in found if counts[i, j]]


def by_class(predictions: Predictions) -> list[ClassRow]:
    """A row for each class with test examples, the least accurate first."""
    counts, classes = predictions.confusion, predictions.classes
    totals, mistakes = counts.sum(axis=1), _mistakes(counts)
    wrong = mistakes.sum(axis=1)
    accuracy = class_counts(counts).recall
    rows = []
    for i in np.argsort(accuracy, kind="stable"):
        other = int(mistakes[i].argmax())
        mistaken = f"{classes[other]} ({mistakes[i, other]})" if wrong[i] else ""
        share = wrong[i] / max(int(wrong.max()), 1)
        rows.append(ClassRow(classes[i], int(totals[i]), float(accuracy[i]), int(wrong[i]), float(share), mistaken))
    return [row for row in rows if row.images]


def worst_mistakes(predictions: Predictions, count: int = MOST_PICTURES) -> list[Picture]:
    """At most `count` mistakes, those with the highest probability of the wrong class first."""
    columns, wrong = predictions.columns, np.flatnonzero(predictions.predicted != predictions.labels)
    surest = np.argsort(-predictions.probabilities[wrong].max(axis=1), kind="stable")[:count]
    mistakes = wrong[surest].tolist()
    addresses = [""] * len(mistakes)
    if mistakes and predictions.images.shape[2:] != (1, 1):  # not rows of a table
        addresses = [*map(data_url, shown(predictions.images[mistakes]))]
    return [
        Picture(
            address,
            image,
            _candidates(predictions, image),
            [] if columns is None else columns.values(np.asarray(predictions.images[image])),
        )
        for image, address in zip(mistakes, addresses, strict=True)
    ]


def _candidates(predictions: Predictions, image: int) -> list[Candidate]:
    """The most probable classes of an image and its label, CANDIDATES in all, the most probable first."""
    row, label = predictions.probabilities[image], int(predictions.labels[image])
    top = np.argsort(-row, kind="stable")[:CANDIDATES].tolist()
    if label not in top:
        top = [*top[: CANDIDATES - 1], label]
    return [Candidate(predictions.classes[i], float(row[i]) if i < len(row) else 0.0, i == label) for i in top]


def filters(predictions: Predictions) -> list[str]:
    """The addresses of pictures of the first layer's weights, one for each output."""
    return [] if predictions.filters is None else [*map(data_url, signed(predictions.filters[:MOST_FILTERS]))]


def _mistakes(counts: np.ndarray) -> np.ndarray:
    return counts - np.diag(np.diag(counts))


def shown(images: np.ndarray) -> np.ndarray:
    """Images (N, C, H, W) as uint8 (N, H, W, 1 or 3): RGB for three channels, otherwise grey.

    Floats are scaled from [0, 1], or from their minimum and maximum if they exceed that range. Two channels, or more
    than three, are averaged.
    """
    if images.dtype != np.uint8:
        low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 1.0)
        if low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        images = (images.astype(np.float64) - low) / (high - low or 1.0) * 255
    if images.shape[1] not in (1, 3):
        images = images.mean(axis=1, keepdims=True)
    return np.round(images).astype(np.uint8).transpose(0, 2, 3, 1)


def signed(weights: np.ndarray) -> np.ndarray:
    """Weights (N, C, H, W) as uint8 (N, H, W, 3): blue above 0, orange below, white at 0, in one scale for all.

    The sum over the channels is shown.
    """
    values = weights.sum(axis=1).astype(np.float64)
    strength = values / (np.abs(values).max() or 1.0)
    end = np.where(strength[..., None] > 0, POSITIVE, NEGATIVE)
    return np.round(255 + (end - 255) * np.abs(strength)[..., None]).astype(np.uint8)


def data_url(pixels: np.ndarray) -> str:
    """A picture as the address of an image."""
    return f"data:image/png;base64,{b64encode(png(pixels)).decode()}"


def png(pixels: np.ndarray) -> bytes:
    """uint8 (H, W, 1 or 3) as the content of a PNG file."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(content, "PNG")
    return content.getvalue()
