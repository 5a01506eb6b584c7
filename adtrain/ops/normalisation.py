"""Batch, layer and group norm, by one primitive, standardize, over different axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.axes import along
from adtrain.core.custom import custom_vjp
from adtrain.core.errors import ShapeError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.collectives import gather_shards, pairwise_sum
from adtrain.ops.common import ArrayLike, accurate_sum, as_value, integers, keep_axes, require_float, reshape
from adtrain.ops.elementwise import astype, rsqrt, square
from adtrain.ops.reduce import first_of, mean
from adtrain.ops.shape import slice, stack

__all__ = ["batch_norm", "group_norm", "layer_norm"]


def _standardize_shape(x: Any, axes: tuple[int, ...], eps: float) -> tuple[ArrayType, ArrayType, ArrayType]:
    require_float("standardize", x)
    if any(x.shape[i] == 0 for i in axes):
        raise ShapeError(f"normalisation: shape {x.shape} has no elements along axes {axes}")
    statistic = ArrayType(keep_axes(x.shape, axes), x.dtype)
    return ArrayType(x.shape, x.dtype), statistic, statistic


def _standardize_reference(x: np.ndarray, axes: tuple[int, ...], eps: float) -> tuple[np.ndarray, ...]:
    count = x.dtype.type(math.prod(x.shape[i] for i in axes))
    # Less the first element, numbers that are all alike are 0, and numbers near one another keep their digits.
    first = x[tuple(np.s_[:1] if i in axes else np.s_[:] for i in range(x.ndim))]
    shifted = x - first
    average = accurate_sum(shifted, axes, keepdims=True) / count
    centred = shifted - average
    variance = accurate_sum(centred * centred, axes, keepdims=True) / count
    return centred / np.sqrt(variance + x.dtype.type(eps)), first + average, variance


def _standardize_vjp(out: Any, x: Value, axes: tuple[int, ...], eps: float) -> Any:
    y, _, variance = out
    count = math.prod(x.shape[i] for i in axes)

    def pullback(cts: Any) -> Value:
        # dx = (dy - mean(dy) - y mean(y dy)) / sigma + dmean / n + 2 (x - mean) dvar / n, and x - mean = sigma y
        ct, ct_mean, ct_variance = cts
        inverse = rsqrt(variance + eps)
        parts = []
        if ct is not None:
            parts.append((ct - mean(ct, axes, keepdims=True) - y * mean(ct * y, axes, keepdims=True)) * inverse)
        if ct_mean is not None:
            parts.append(ct_mean * (1.0 / count) + y * 0.0)
        if ct_variance is not None:
            parts.append(y * (ct_variance * (2.0 / count) / inverse))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    return pullback


standardize_p: Primitive = Primitive(
    "standardize",
    _standardize_shape,
    _standardize_reference,
    [_standardize_vjp],
    lambda x, axes, eps: 6 * x.size,
    axes=lambda x, axes, eps: along(x.ndim, axes, results=3),
)


def _affine(y: Value, weight: ArrayLike | None, bias: ArrayLike | None, shape: Sequence[int]) -> Value:
    if weight is not None:
        y = y * reshape(weight, shape)
    return y if bias is None else y + reshape(bias, shape)


def _scale(axes: tuple[int, ...], eps: float) -> Callable[..., Value]:
    """A function ``(x, y, variance, weight) -> y * weight``, where `standardize_p` computes y and variance from x.

    Its derivative by x includes the part through y and variance, so these get no cotangent. ``weight`` does not vary
    along ``axes``, so the derivative needs two sums, of ct and of ct y. These are also the gradients of bias and
    weight.
    """

    def forward(x: Value, y: Value, variance: Value, weight: Value) -> tuple[Value, Any]:
        return y * reshape(weight, variance.shape[1:]), (y, variance, weight)

    def backward(residuals: Any, ct: Value) -> tuple[Value | None, ...]:
        y, variance, weight = residuals
        product = (ct * y).sum(axes, keepdims=True)
        count = math.prod(y.shape[i] for i in axes)
        scale = reshape(weight, variance.shape) * rsqrt(variance + eps)
        dx = (ct - mean(ct, axes, keepdims=True) - y * (product / count)) * scale
        return astype(dx, y.dtype), None, None, astype(reshape(product, weight.shape), weight.dtype)

    return custom_vjp(forward, backward)


def _check_parameter(name: str, what: str, parameter: Any, shape: tuple[int, ...]) -> None:
    if parameter is not None and as_value(parameter).shape != shape:
        raise ShapeError(f"{name}: the {what} has shape {as_value(parameter).shape}, expected {shape}")


def batch_norm(
    x: ArrayLike,
    running_mean: ArrayLike,
    running_var: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    shards: Sequence[int] = (),
) -> tuple[Value, Value, Value]:
    """Normalise each channel to mean 0 and variance 1 over the batch (S. Ioffe, C. Szegedy, 2015).

    Args:
        x: (N, C, ...).
        running_mean, running_var, weight, bias: (C,).
        training: normalise by the statistics of this batch, and update the running ones by ``momentum`` (with the
            unbiased variance, as PyTorch). Otherwise normalise by the running ones.
        shards: the number of samples in each shard of the batch. ``x`` is one shard, and is normalised by the
            statistics of the whole batch, which `gather_shards` exchanges. Empty: ``x`` is the batch.

    Returns:
        y like ``x``, and the new running mean and variance.

    Raises:
        ShapeError: a parameter does not fit, or a channel has one value in training.
    """
    if running_mean is None or running_var is None:
        raise ShapeError(
            "batch_norm: running_mean or running_var is None, expected arrays of shape (C,), initially 0 and 1"
        )
    value, average, variance = as_value(x), as_value(running_mean), as_value(running_var)
    if value.ndim < 2:
        raise ShapeError(f"batch_norm: found shape {value.shape}, expected (N, C, ...)")
    channels = value.shape[1]
    named = {"running_mean": average, "running_var": variance, "weight": weight, "bias": bias}
    for what, parameter in named.items():
        _check_parameter("batch_norm", what, parameter, (channels,))
    shape = (channels,) + (1,) * (value.ndim - 2)
    if not training:
        y = (value - reshape(average, shape)) * reshape(rsqrt(variance + eps), shape)
        return _affine(y, weight, bias, shape), average, variance
    axes = tuple(i for i in range(value.ndim) if i != 1)
    count = math.prod(value.shape[2:]) * (sum(shards) or value.shape[0])
    if count < 2:
        raise ShapeError(
            f"batch_norm: shape {value.shape} has {count} values a channel, expected at least 2 in training"
        )
    if shards:
        y, batch_mean, batch_var = _standardize_all(value, axes, shards, eps)
    else:
        y, batch_mean, batch_var = bind(standardize_p, value, axes=axes, eps=eps)
        if weight is not None:
            y, weight = _scale(axes, eps)(value, y, batch_var, as_value(weight)), None
    new_mean = average * (1 - momentum) + reshape(batch_mean, (channels,)) * momentum
    new_var = variance * (1 - momentum) + reshape(batch_var, (channels,)) * (momentum * count / (count - 1))
    return _affine(y, weight, bias, shape), new_mean, new_var


def _standardize_all(x: Value, axes: tuple[int, ...], shards: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """`standardize_p` over all shards of a batch.

    The mean and variance of each shard are exchanged, and combined as by T. Chan, G. Golub and R. LeVeque (1979).
    """
    first = first_of(axes)(x)
    average = first + mean(x - first, axes, keepdims=True)
    statistics = stack([average, mean(square(x - average), axes, keepdims=True)])
    gathered = gather_shards(statistics, len(shards))
    weights = [n / sum(shards) for n in shards]
    means, variances = ([reshape(row, average.shape) for row in _column(gathered, i)] for i in (0, 1))
    average = means[0] + pairwise_sum([(m - means[0]) * w for m, w in zip(means, weights, strict=True)])
    terms = zip(means, variances, weights, strict=True)
    variance = pairwise_sum([(v + square(m - average)) * w for m, v, w in terms])
    return (x - average) * rsqrt(variance + eps), average, variance


def _column(x: Value, column: int) -> list[Value]:
    """``x[0, column], x[1, column], ...``"""
    return [slice(x, [i, column, *[0] * (x.ndim - 2)], [i + 1, column + 1, *x.shape[2:]]) for i in range(x.shape[0])]


@checked_options
def layer_norm(
    x: ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> Value:
    """Mean 0 and variance 1 over the last axes (J. Ba, J. Kiros, G. Hinton, 2016).

    Args:
        normalized_shape: the lengths of those axes, also the shape of ``weight`` and ``bias``.

    Raises:
        ShapeError: ``x`` does not end in ``normalized_shape``, or a parameter does not fit.
    """
    value = as_value(x)
    shape = integers("layer_norm", "normalized_shape", normalized_shape)
    if not shape or value.shape[-len(shape) :] != shape:
        raise ShapeError(f"layer_norm: shape {value.shape} does not end in {shape}")
    _check_parameter("layer_norm", "weight", weight, shape)
    _check_parameter("layer_norm", "bias", bias, shape)
    axes = tuple(range(value.ndim - len(shape), value.ndim))
    return _affine(bind(standardize_p, value, axes=axes, eps=eps)[0], weight, bias, shape)


@checked_options
def group_norm(
    x: ArrayLike,
    num_groups: int,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> Value:
    """Mean 0 and variance 1 over each of ``num_groups`` groups of channels of (N, C, ...) (Y. Wu, K. He, 2018).

    Raises:
        ShapeError: the channels do not divide into ``num_groups``, or a parameter does not fit.
    """
    value = as_value(x)
    if value.ndim < 2 or num_groups < 1 or value.shape[1] % num_groups:
        raise ShapeError(f"group_norm: shape {value.shape} does not divide into {num_groups} groups of channels")
    n, channels, *rest = value.shape
    _check_parameter("group_norm", "weight", weight, (channels,))
    _check_parameter("group_norm", "bias", bias, (channels,))
    grouped = reshape(value, (n, num_groups, channels // num_groups * math.prod(rest)))
    y = reshape(bind(standardize_p, grouped, axes=(2,), eps=eps)[0], value.shape)
    return _affine(y, weight, bias, (channels,) + (1,) * len(rest))
