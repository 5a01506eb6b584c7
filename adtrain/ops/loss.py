"""Losses of two arrays of the same shape, and the reduction of all losses.

``reduction`` is "none" (a loss for each element or row), "sum" or "mean".
"""

from __future__ import annotations

from typing import Any, Literal

from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.core.options import checked_options
from adtrain.ops.activation import softplus
from adtrain.ops.broadcasting import promote
from adtrain.ops.common import ArrayLike, ClassFactors, as_value, broadcast_shapes
from adtrain.ops.compare import less, where
from adtrain.ops.elementwise import abs, astype, square
from adtrain.ops.reduce import mean, sum
from adtrain.option_types import Positive

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
