"""Reductions over any axes, and the running sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.broadcasting import floating, keep_axes, reshape, spread, sum_p, summed
from adtrain.ops.common import ArrayLike, Axis, as_value, normalize_axes, normalize_axis, require_float
from adtrain.ops.compare import equal
from adtrain.ops.elementwise import exp


def _dropped(name: str, floating_only: bool = False) -> Callable[..., ArrayType]:
    """The shape rule of a reduction that is undefined for no elements."""

    def rule(x: Any, axes: tuple[int, ...]) -> ArrayType:
        if floating_only:
            require_float(name, x)
        if any(x.shape[i] == 0 for i in axes):
            raise ShapeError(f"{name}: shape {x.shape} has no elements along axes {axes}")
        return ArrayType(tuple(n for i, n in enumerate(x.shape) if i not in axes), x.dtype)

    return rule


def _extreme_vjp(out: Value, x: Value, axes: tuple[int, ...]) -> Any:
    """All elements equal to the extreme share the cotangent equally."""
    shape = x.shape
    chosen = equal(x, spread(out, shape, axes))

    def pullback(ct: Value) -> Value:
        mask = chosen.astype(ct.dtype)
        return mask * spread(ct / bind(sum_p, mask, axes=axes), shape, axes)

    return pullback


def _logsumexp_reference(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = np.max(x, axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, x.dtype.type(0))  # all -inf: log 0, not inf - inf
    return np.squeeze(np.log(np.sum(np.exp(x - top), axis=axes, keepdims=True)) + top, axis=axes)


def _logsumexp_vjp(out: Value, x: Value, axes: tuple[int, ...]) -> Any:
    """softmax(x). exp(x - out) alone does not sum to 1, because out is rounded: at 1e6 by up to 0.03 in float32."""
    weights = exp(x - spread(out, x.shape, axes))
    total = bind(sum_p, weights, axes=axes)
    return lambda ct: spread(ct / total, x.shape, axes) * weights


def _extreme(name: str, cpu: Callable[..., Any]) -> Primitive:
    reference = lambda x, axes: cpu(x, axis=axes)  # noqa: E731
    return Primitive(
        name,
        _dropped(name),
        reference,
        [_extreme_vjp],
        lambda x, axes: x.size,
        traits=(Trait.REDUCTION, Trait.ALONG_AXIS),
    )


max_p: Primitive = _extreme("max", np.max)
min_p: Primitive = _extreme("min", np.min)
logsumexp_p: Primitive = Primitive(
    "logsumexp",
    _dropped("logsumexp", floating_only=True),
    _logsumexp_reference,
    [_logsumexp_vjp],
    lambda x, axes: 4 * x.size,
)


def _argmax_shape(x: Any, axis: int) -> ArrayType:
    if x.shape[axis] == 0:
        raise ShapeError(f"argmax: shape {x.shape} has no elements along axis {axis}")
    return ArrayType(x.shape[:axis] + x.shape[axis + 1 :], np.dtype(np.int64))


argmax_p: Primitive = Primitive(
    "argmax",
    _argmax_shape,
    lambda x, axis: np.argmax(x, axis=axis),
    flops=lambda x, axis: x.size,
    traits=(Trait.ALONG_AXIS,),
)


def _cumsum_reference(x: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    dtype = summed(x.dtype)
    if reverse:
        return np.flip(np.cumsum(np.flip(x, axis), axis=axis, dtype=dtype), axis)
    return np.cumsum(x, axis=axis, dtype=dtype)


cumsum_p: Primitive = Primitive(
    "cumsum",
    lambda x, axis, reverse: ArrayType(x.shape, summed(x.dtype)),
    _cumsum_reference,
    [lambda out, x, axis, reverse: lambda ct: bind(cumsum_p, ct, axis=axis, reverse=not reverse)],
)


def _reduce(name: str, primitive: Primitive, x: ArrayLike, axis: Axis, keepdims: bool) -> Value:
    value = as_value(x)
    axes = normalize_axes(name, axis, value.ndim)
    out = bind(primitive, value, axes=axes)
    return reshape(out, keep_axes(value.shape, axes)) if keepdims else out


def sum(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """Sum over ``axis`` (one, several, or all for None); integers are summed as int64."""
    return _reduce("sum", sum_p, x, axis, keepdims)


def mean(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """Arithmetic mean over ``axis``; integers as float32.

    Raises:
        ShapeError: there are no elements along ``axis``.
    """
    value = floating(as_value(x))
    axes = normalize_axes("mean", axis, value.ndim)
    count = math.prod(value.shape[i] for i in axes)
    if count == 0:
        raise ShapeError(f"mean: shape {value.shape} has no elements along axes {axes}")
    return _reduce("mean", sum_p, value, axes, keepdims) / count


def var(x: ArrayLike, axis: Axis = None, keepdims: bool = False, correction: int = 0) -> Value:
    """Sum of squared deviations from the mean over ``axis``, divided by ``count - correction``.

    Raises:
        ShapeError: ``count`` is not above ``correction``.
    """
    value = floating(as_value(x))
    axes = normalize_axes("var", axis, value.ndim)
    count = math.prod(value.shape[i] for i in axes)
    if count <= correction:
        raise ShapeError(f"var: shape {value.shape} has {count} elements along axes {axes}, expected over {correction}")
    deviation = value - mean(value, axes, keepdims=True)
    return sum(deviation * deviation, axes, keepdims) / (count - correction)


def max(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """The largest element over ``axis``; NaN where one is NaN. Equal elements share the cotangent.

    Raises:
        ShapeError: there are no elements along ``axis``.
    """
    return _reduce("max", max_p, x, axis, keepdims)


def min(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """The smallest element over ``axis``; NaN where one is NaN. Equal elements share the cotangent.

    Raises:
        ShapeError: there are no elements along ``axis``.
    """
    return _reduce("min", min_p, x, axis, keepdims)


def logsumexp(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """log(sum(exp(x))) over ``axis``, without overflow.

    Raises:
        ShapeError: there are no elements along ``axis``. DTypeError: ``x`` is not floating point.
    """
    return _reduce("logsumexp", logsumexp_p, x, axis, keepdims)


def argmax(x: ArrayLike, axis: int | None = None, keepdims: bool = False) -> Value:
    """Index (int64) of the first largest element (or NaN) along ``axis``, or in the flattened array for None.

    Raises:
        ShapeError: there are no elements along ``axis``.
    """
    value = as_value(x)
    flat = reshape(value, (-1,)) if axis is None else value
    position = normalize_axis("argmax", 0 if axis is None else axis, flat.ndim)
    out = bind(argmax_p, flat, axis=position)
    if not keepdims:
        return out
    return reshape(out, keep_axes(value.shape, range(value.ndim) if axis is None else (position,)))


def cumsum(x: ArrayLike, axis: int = 0, reverse: bool = False) -> Value:
    """Running sum along ``axis``, from the end with ``reverse``; integers are summed as int64."""
    value = as_value(x)
    return bind(cumsum_p, value, axis=normalize_axis("cumsum", axis, value.ndim), reverse=reverse)
