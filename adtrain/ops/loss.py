"""Losses: each a mean over the rows or elements, of shape ()."""

from __future__ import annotations

from typing import Any

from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.ops.activation import softplus
from adtrain.ops.broadcasting import promote, reshape
from adtrain.ops.common import ArrayLike, as_value
from adtrain.ops.compare import less, where
from adtrain.ops.elementwise import abs, square
from adtrain.ops.index import pick
from adtrain.ops.reduce import mean
from adtrain.ops.softmax import log_softmax


def cross_entropy(logits: ArrayLike, targets: ArrayLike, label_smoothing: float = 0.0) -> Value:
    """-log softmax(logits)[target], mean over rows.

    Args:
        logits: (N, C).
        targets: (N,) integers in [0, C).
        label_smoothing: the share of the target that is spread evenly over all classes (C. Szegedy et al., 2016).

    Raises:
        ShapeError: the shapes do not fit, or a target is out of range.
    """
    if not 0 <= label_smoothing < 1:
        raise ShapeError(f"cross_entropy: label_smoothing is {label_smoothing}, expected 0 <= it < 1")
    log_probs = log_softmax(logits)
    loss = nll_loss(log_probs, targets)
    if label_smoothing == 0:
        return loss
    return loss * (1.0 - label_smoothing) - mean(log_probs) * label_smoothing


def nll_loss(log_probs: ArrayLike, targets: ArrayLike) -> Value:
    """-log_probs[target], mean over rows: (N, C) and (N,) integers."""
    value, labels = as_value(log_probs), as_value(targets)
    if value.ndim != 2 or labels.shape != value.shape[:1]:
        raise ShapeError(f"nll_loss: found {value.shape} and targets {labels.shape}, expected (N, C) and (N,)")
    return -mean(pick(value, reshape(labels, (-1, 1)), axis=1))


def mse_loss(pred: ArrayLike, target: ArrayLike) -> Value:
    """(pred - target)^2, mean over elements."""
    return mean(square(_difference("mse_loss", pred, target)))


def l1_loss(pred: ArrayLike, target: ArrayLike) -> Value:
    """|pred - target|, mean over elements."""
    return mean(abs(_difference("l1_loss", pred, target)))


def huber_loss(pred: ArrayLike, target: ArrayLike, delta: float = 1.0) -> Value:
    """d^2 / 2 for |d| < delta, else delta (|d| - delta / 2), mean over elements (P. Huber, 1964)."""
    if delta <= 0:
        raise ShapeError(f"huber_loss: found delta = {delta}, expected it above 0")
    difference = _difference("huber_loss", pred, target)
    distance = abs(difference)
    return mean(where(less(distance, delta), square(difference) * 0.5, (distance - 0.5 * delta) * delta))


def binary_cross_entropy_with_logits(logits: ArrayLike, targets: ArrayLike) -> Value:
    """-t log s - (1 - t) log(1 - s) with s = sigmoid(logits), mean over elements."""
    x, t = _same_shape("binary_cross_entropy_with_logits", logits, targets)
    return mean(softplus(-x) * t + softplus(x) * (1.0 - t))  # -log s = softplus(-x), -log(1 - s) = softplus(x)


def _difference(name: str, pred: ArrayLike, target: ArrayLike) -> Any:
    a, b = _same_shape(name, pred, target)
    return a - b


def _same_shape(name: str, pred: ArrayLike, target: ArrayLike) -> list[Value]:
    a, b = promote(pred, target)
    if a.shape != b.shape:
        raise ShapeError(f"{name}: found shapes {a.shape} and {b.shape}, expected equal ones")
    return [a, b]
