"""Losses of two arrays of the same shape, losses of a classification, and their reduction.

``reduction`` is "none" (a loss for each element or row), "sum" or "mean". The targets of a classification are labels,
or probabilities of the classes.
"""

from __future__ import annotations

from typing import Any, Literal

from adtrain.core.array import Value
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.options import checked_options
from adtrain.ops.common import ArrayLike, BalancedFactors, ClassFactors, as_value, broadcast_shapes, promote, reshape
from adtrain.ops.compare import less, not_equal, where
from adtrain.ops.elementwise import abs, astype, softplus, square
from adtrain.ops.index import embedding, pick
from adtrain.ops.reduce import log_softmax, mean, sum
from adtrain.option_types import Fraction, Positive

__all__ = ["binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "l1_loss", "mse_loss", "nll_loss"]

Reduction = Literal["none", "sum", "mean"]


@checked_options
def mse_loss(pred: ArrayLike, target: ArrayLike, *, reduction: Reduction = "mean") -> Value:
    """(pred - target)^2 of each element, reduced."""
    return reduced("mse_loss", square(_difference("mse_loss", pred, target)), reduction)


@checked_options
def l1_loss(pred: ArrayLike, target: ArrayLike, *, reduction: Reduction = "mean") -> Value:
    """|pred - target| of each element, reduced."""
    return reduced("l1_loss", abs(_difference("l1_loss", pred, target)), reduction)


@checked_options
def huber_loss(pred: ArrayLike, target: ArrayLike, delta: Positive = 1.0, *, reduction: Reduction = "mean") -> Value:
    """d^2 / 2 for |d| < delta, else delta (|d| - delta / 2), of each element, reduced (P. Huber, 1964)."""
    difference = _difference("huber_loss", pred, target)
    distance = abs(difference)
    losses = where(less(distance, delta), square(difference) * 0.5, (distance - 0.5 * delta) * delta)
    return reduced("huber_loss", losses, reduction)


@checked_options
def binary_cross_entropy_with_logits(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    weight: ClassFactors | None = None,
    pos_weight: ClassFactors | None = None,
    reduction: Reduction = "mean",
) -> Value:
    """-pos_weight t log s - (1 - t) log(1 - s) with s = sigmoid(logits), times weight, of each element, reduced.

    Args:
        logits, targets: one shape; targets are in [0, 1].
        weight, pos_weight: factors that broadcast to that shape. The mean divides by the number of elements.

    Raises:
        ShapeError: the shapes do not fit. OptionError: an option has another value.
    """
    name = "binary_cross_entropy_with_logits"
    x, t = _same_shape(name, logits, targets)
    positive = softplus(-x) * t  # -log s = softplus(-x), -log(1 - s) = softplus(x)
    if pos_weight is not None:
        positive = positive * _factor(name, "pos_weight", pos_weight, x)
    losses = positive + softplus(x) * (1.0 - t)
    if weight is not None:
        losses = losses * _factor(name, "weight", weight, x)
    return reduced(name, losses, reduction)


def reduced(name: str, losses: Value, reduction: Reduction) -> Value:
    """The losses themselves, their sum, or their mean."""
    if reduction == "none":
        return losses
    return sum(losses) if reduction == "sum" else mean(losses)


def cast_like(weight: ArrayLike, x: Value) -> Value:
    """Weights with the dtype and the device of ``x``."""
    value = weight if isinstance(weight, Value) else as_value(weight).to(x.device)
    return astype(value, x.dtype)


def _factor(name: str, option: str, weight: ArrayLike, x: Value) -> Value:
    """Weights that broadcast to the shape of ``x``."""
    value = cast_like(weight, x)
    if broadcast_shapes(f"{name}: {option}", value.shape, x.shape) != x.shape:
        raise ShapeError(f"{name}: found {option} of shape {value.shape}, expected it to broadcast to {x.shape}")
    return value


def _difference(name: str, pred: ArrayLike, target: ArrayLike) -> Any:
    a, b = _same_shape(name, pred, target)
    return a - b


def _same_shape(name: str, pred: ArrayLike, target: ArrayLike) -> list[Value]:
    a, b = promote(pred, target)
    if a.shape != b.shape:
        raise ShapeError(f"{name}: found shapes {a.shape} and {b.shape}, expected equal ones")
    return [a, b]


@checked_options
def cross_entropy(
    logits: ArrayLike,
    targets: ArrayLike,
    label_smoothing: Fraction = 0.0,
    *,
    weight: BalancedFactors | None = None,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
) -> Value:
    """-log softmax(logits)[target] of each row, reduced as ``reduction`` says.

    Args:
        logits: (N, C), (N, C, d...) or (C,).
        targets: labels, integers in [0, C), of the logits' shape without C; or probabilities of the classes, floating
            point, of the logits' shape.
        label_smoothing: the share of the target that is spread evenly over all classes (C. Szegedy et al., 2016).
        weight: (C,), a factor for each class. The mean is the sum divided by the sum of the labels' weights, or, for
            probabilities, by the number of rows.
        ignore_index: rows with this label have loss 0 and do not count in the mean, which is NaN if no row counts.
        reduction: "none", "sum" or "mean".

    Raises:
        ShapeError: the shapes do not fit, or a label is out of range.
        OptionError: ``label_smoothing`` or ``reduction`` has another value.
        DTypeError: ``ignore_index`` is given with probabilities.
    """
    scores, labels = as_value(logits), as_value(targets)
    axis = _class_axis("cross_entropy", scores)
    log_probs = log_softmax(scores, axis)
    if labels.dtype.kind != "f":
        return _label_loss("cross_entropy", log_probs, labels, label_smoothing, weight, ignore_index, reduction)
    if ignore_index is not None:
        raise DTypeError(f"cross_entropy: ignore_index is for labels, found probabilities of type {labels.dtype}")
    if labels.shape != scores.shape:
        raise ShapeError(
            f"cross_entropy: found {scores.shape} and {labels.dtype} targets {labels.shape}, expected probabilities of "
            "the shape of the logits, or integers"
        )
    classes = scores.shape[axis]
    probabilities = labels * (1.0 - label_smoothing) + label_smoothing / classes if label_smoothing else labels
    if weight is not None:
        log_probs = log_probs * _class_weights("cross_entropy", weight, log_probs, axis)
    return -reduced("cross_entropy", sum(log_probs * probabilities, axis), reduction)


@checked_options
def nll_loss(
    log_probs: ArrayLike,
    targets: ArrayLike,
    *,
    weight: BalancedFactors | None = None,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
) -> Value:
    """-log_probs[target] of each row, reduced. Arguments and errors are those of `cross_entropy` for labels."""
    return _label_loss("nll_loss", as_value(log_probs), as_value(targets), 0.0, weight, ignore_index, reduction)


def _label_loss(
    name: str,
    log_probs: Value,
    labels: Value,
    smoothing: float,
    weight: ArrayLike | None,
    ignore_index: int | None,
    reduction: Reduction,
) -> Value:
    axis = _class_axis(name, log_probs)
    rows = log_probs.shape[:axis] + log_probs.shape[axis + 1 :]
    if labels.shape != rows:
        raise ShapeError(f"{name}: found {log_probs.shape} and targets {labels.shape}, expected targets {rows}")
    labels = reshape(labels, (*rows[:axis], 1, *rows[axis:]))
    row_weights = None  # None: every row has weight 1
    kept = None  # None: no row is ignored
    if ignore_index is not None:
        kept = not_equal(labels, ignore_index)
        labels = where(kept, labels, 0)
    try:
        log_likelihoods = pick(log_probs, labels, axis)
    except ShapeError as error:
        raise ShapeError(f"{name}: a label is out of range ({error}); ignore_index leaves out rows") from None
    if weight is not None:
        factors = _class_weights(name, weight, log_probs, axis)
        row_weights = embedding(labels, reshape(factors, (-1,)))
        log_likelihoods, log_probs = log_likelihoods * row_weights, log_probs * factors if smoothing else log_probs
    if smoothing:
        log_likelihoods = log_likelihoods * (1.0 - smoothing) + mean(log_probs, axis, keepdims=True) * smoothing
    if kept is not None:
        log_likelihoods = where(kept, log_likelihoods, 0.0)
        row_weights = kept.astype(log_probs.dtype) if row_weights is None else where(kept, row_weights, 0.0)
    if row_weights is not None and reduction == "mean":
        return -(sum(log_likelihoods) / sum(row_weights))
    return -reduced(name, reshape(log_likelihoods, rows) if reduction == "none" else log_likelihoods, reduction)


def _class_axis(name: str, scores: Value) -> int:
    if scores.ndim == 0:
        raise ShapeError(f"{name}: found shape (), expected (N, C), (N, C, d...) or (C,)")
    return min(1, scores.ndim - 1)


def _class_weights(name: str, weight: ArrayLike, scores: Value, axis: int) -> Value:
    """The weights of the classes, in a shape that broadcasts to that of the scores."""
    value = cast_like(weight, scores)
    if value.shape != (scores.shape[axis],):
        raise ShapeError(
            f"{name}: found weight of shape {value.shape}, expected ({scores.shape[axis]},): one number for each class"
        )
    return reshape(value, (-1,) + (1,) * (scores.ndim - axis - 1))
