"""Reductions over any axes, the running sum, softmax and its logarithm.

As in NumPy, ``axis=()`` reduces over no axis, and a 0-d array may be reduced over axis 0 or -1.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.axes import along, without
from adtrain.core.custom import custom_vjp
from adtrain.core.errors import ShapeError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.ops.common import (
    ArrayLike,
    Axis,
    accurate_sum,
    along_axis,
    as_value,
    floating,
    keep_axes,
    normalize_axes,
    normalize_axis,
    require_float,
    reshape,
    spread,
    sum_p,
    summed,
)
from adtrain.ops.compare import equal, isfinite, less, not_equal, where
from adtrain.ops.elementwise import astype, exp, neg, sqrt
from adtrain.ops.shape import pad, slice

__all__ = [
    "all", "any", "argmax", "argmin", "cumsum", "log_softmax", "logsumexp", "max", "mean", "min", "prod", "softmax",
    "std", "sum", "var",
]  # fmt: skip


def _without(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def _dropped(name: str, floating_only: bool = False) -> Callable[..., ArrayType]:
    """The shape rule of a reduction that is undefined for no elements."""

    def rule(x: Any, axes: tuple[int, ...]) -> ArrayType:
        if floating_only:
            require_float(name, x)
        if builtins.any(x.shape[i] == 0 for i in axes):
            raise ShapeError(f"{name}: shape {x.shape} has no elements along axes {axes}")
        return ArrayType(_without(x.shape, axes), x.dtype)

    return rule


def _extreme_vjp(out: Value, x: Value, axes: tuple[int, ...]) -> Any:
    """All elements equal to the extreme share the cotangent equally.

    A `map_reduce` kernel computes x again to compare it. Generated code is not contracted, so x has the same bits.
    """
    shape = x.shape
    chosen = equal(x, spread(out, shape, axes))
    count = bind(sum_p, chosen.astype(x.dtype), axes=axes)
    return lambda ct: chosen.astype(ct.dtype) * spread(ct / count, shape, axes)


def _logsumexp_reference(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = np.max(x, axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, x.dtype.type(0))  # all -inf: log 0, not inf - inf
    return np.squeeze(np.log(accurate_sum(np.exp(x - top), axes, keepdims=True)) + top, axis=axes)


def _logsumexp_vjp(out: Value, x: Value, axes: tuple[int, ...]) -> Any:
    """The derivative is softmax(x).

    exp(x - out) does not sum to 1, because out is rounded (in float32 an out of 1e6 by up to 0.03). So it is divided by
    its sum. Where x is infinite, so is out: finite elements have weight 0, and the others NaN, which is in no sum.
    """
    weights = exp(x - spread(out, x.shape, axes))
    total = where(isfinite(out), bind(sum_p, weights, axes=axes), 1.0)
    return lambda ct: spread(ct / total, x.shape, axes) * weights


def _extreme(name: str, cpu: Callable[..., Any]) -> Primitive:
    reference = lambda x, axes: cpu(x, axis=axes)  # noqa: E731
    return Primitive(
        name,
        _dropped(name),
        reference,
        [_extreme_vjp],
        lambda x, axes: x.size,
        traits=(Trait.REDUCTION,),
        axes=lambda x, axes: without(x.ndim, axes),
    )


max_p: Primitive = _extreme("max", np.max)
min_p: Primitive = _extreme("min", np.min)
logsumexp_p: Primitive = Primitive(
    "logsumexp",
    _dropped("logsumexp", floating_only=True),
    _logsumexp_reference,
    [_logsumexp_vjp],
    lambda x, axes: 4 * x.size,
    axes=lambda x, axes: without(x.ndim, axes),
)


argmax_p: Primitive = Primitive(
    "argmax",
    lambda x, axis: ArrayType(_without(x.shape, (axis,)), np.dtype(np.int64)),
    lambda x, axis: np.argmax(x, axis=axis),
    flops=lambda x, axis: x.size,
    axes=lambda x, axis: without(x.ndim, (axis,)),
)


def _cumsum_reference(x: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    # float32 is added in float64: NumPy's running sum is sequential
    dtype = np.dtype(np.float64) if x.dtype.kind == "f" else np.dtype(np.int64)
    along = np.flip(x, axis) if reverse else x
    total = np.cumsum(along, axis=axis, dtype=dtype).astype(summed(x.dtype), copy=False)
    return np.flip(total, axis) if reverse else total


cumsum_p: Primitive = Primitive(
    "cumsum",
    lambda x, axis, reverse: ArrayType(x.shape, summed(x.dtype)),
    _cumsum_reference,
    [lambda out, x, axis, reverse: lambda ct: bind(cumsum_p, ct, axis=axis, reverse=not reverse)],
    axes=lambda x, axis, reverse: along(x.ndim, (axis,)),
    traits=(Trait.LINEAR,),
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


def first_of(axes: Sequence[int]) -> Callable[[Value], Value]:
    """A function of the first element along ``axes``, without a derivative: for results that do not depend on it.

    Numbers that are all alike differ from it by 0 exactly. Their mean, a rounded sum, may differ from each of them.
    """

    def forward(x: Value) -> tuple[Value, Any]:
        return slice(x, [0] * x.ndim, [1 if i in axes else n for i, n in enumerate(x.shape)]), None

    return custom_vjp(forward, lambda residuals, ct: (None,))


@checked_options
def var(x: ArrayLike, axis: Axis = None, keepdims: bool = False, correction: float = 0) -> Value:
    """Sum of squared deviations from the mean over ``axis``, divided by ``count - correction``.

    Raises:
        ShapeError: ``count`` is not above ``correction``.
    """
    return _variance("var", x, axis, keepdims, correction)


def _variance(name: str, x: ArrayLike, axis: Axis, keepdims: bool, correction: float) -> Value:
    value = floating(as_value(x))
    axes = normalize_axes(name, axis, value.ndim)
    count = math.prod(value.shape[i] for i in axes)
    if count <= correction:
        raise ShapeError(
            f"{name}: shape {value.shape} has {count} elements along axes {axes}, expected over {correction}"
        )
    if count:
        value = value - first_of(axes)(value)
    deviation = value - mean(value, axes, keepdims=True)
    return sum(deviation * deviation, axes, keepdims) / (count - correction)


@checked_options
def std(x: ArrayLike, axis: Axis = None, keepdims: bool = False, correction: float = 0) -> Value:
    """Standard deviation over ``axis``: the square root of `var`. If it is 0, its gradient is 0, as in PyTorch.

    Raises:
        ShapeError: ``count`` is not above ``correction``.
    """
    variance = _variance("std", x, axis, keepdims, correction)
    constant = equal(variance, 0.0)
    return where(constant, 0.0, sqrt(where(constant, 1.0, variance)))


def prod(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """Product over ``axis`` (one, several, or all for None), 1 of no elements; integers are multiplied as int64.

    The two halves of an axis are multiplied until one element is left. So each derivative is the product of the other
    elements, without a division, also if elements are 0.
    """
    value = as_value(x)
    axes = normalize_axes("prod", axis, value.ndim)
    out = reshape(astype(value, summed(value.dtype)), (-1,) if axis is None else value.shape)
    for i in (0,) if axis is None else axes:
        while out.shape[i] != 1:
            out = _halves_multiplied(out, i)
    return reshape(out, keep_axes(value.shape, axes) if keepdims else _without(value.shape, axes))


def _halves_multiplied(x: Value, axis: int) -> Value:
    if x.shape[axis] % 2 or x.shape[axis] == 0:
        x = pad(x, [(0, int(i == axis)) for i in range(x.ndim)], 1)
        if x.shape[axis] == 1:
            return x
    half = x.shape[axis] // 2
    middle = [half if i == axis else n for i, n in enumerate(x.shape)]
    return slice(x, [0] * x.ndim, middle) * slice(x, [half if i == axis else 0 for i in range(x.ndim)], x.shape)


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


def any(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """Whether any element over ``axis`` is not 0, as bool; NaN is not 0. False if there are no elements."""
    return less(0, sum(not_equal(x, 0), axis, keepdims))


def all(x: ArrayLike, axis: Axis = None, keepdims: bool = False) -> Value:
    """Whether all elements over ``axis`` are not 0, as bool; NaN is not 0. True if there are no elements."""
    return equal(sum(equal(x, 0), axis, keepdims), 0)


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
    return _argmax("argmax", as_value(x), axis, keepdims)


def argmin(x: ArrayLike, axis: int | None = None, keepdims: bool = False) -> Value:
    """Index (int64) of the first smallest element (or NaN) along ``axis``, or in the flattened array for None.

    Raises:
        ShapeError: there are no elements along ``axis``.
    """
    value = as_value(x)
    if value.dtype.kind == "f":
        return _argmax("argmin", neg(value), axis, keepdims)
    if value.dtype.kind == "b":
        value = astype(value, np.uint8)
    # last - x reverses the order; -x would overflow
    last = -1 if value.dtype.kind == "i" else int(np.iinfo(value.dtype).max)
    return _argmax("argmin", last - value, axis, keepdims)


def _argmax(name: str, x: Value, axis: int | None, keepdims: bool) -> Value:
    """Index of the first largest element."""
    flat = reshape(x, (x.size,)) if axis is None or (x.ndim == 0 and axis in (0, -1)) else x
    position = normalize_axis(name, 0 if axis is None else axis, flat.ndim)
    if flat.shape[position] == 0:
        raise ShapeError(f"{name}: shape {flat.shape} has no elements along axis {position}")
    out = bind(argmax_p, flat, axis=position)
    if not keepdims:
        return out
    return reshape(out, keep_axes(x.shape, range(x.ndim) if axis is None else (position,)))


def cumsum(x: ArrayLike, axis: int = 0, reverse: bool = False) -> Value:
    """Running sum along ``axis``, from the end with ``reverse``; integers are summed as int64."""
    return along_axis("cumsum", cumsum_p, x, axis, reverse=reverse)


def _softmax_shape(x: Any, axis: int) -> ArrayType:
    require_float("softmax", x)
    if x.shape[axis] == 0:
        raise ShapeError(f"softmax: shape {x.shape} has no elements along axis {axis}")
    return ArrayType(x.shape, x.dtype)


def _softmax_reference(x: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return powers / accurate_sum(powers, (axis,), keepdims=True)


def _log_softmax_reference(x: np.ndarray, axis: int) -> np.ndarray:
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(accurate_sum(np.exp(shifted), (axis,), keepdims=True))


def _softmax_flops(x: Any, axis: int) -> int:
    return 5 * x.size


softmax_p: Primitive = Primitive(
    "softmax",
    _softmax_shape,
    _softmax_reference,
    [lambda out, x, axis: lambda ct: out * (ct - sum(ct * out, axis, keepdims=True))],
    _softmax_flops,
    axes=lambda x, axis: along(x.ndim, (axis,)),
)
log_softmax_p: Primitive = Primitive(
    "log_softmax",
    _softmax_shape,
    _log_softmax_reference,
    [lambda out, x, axis: lambda ct: ct - exp(out) * sum(ct, axis, keepdims=True)],
    _softmax_flops,
    axes=lambda x, axis: along(x.ndim, (axis,)),
)


def softmax(x: ArrayLike, axis: int = -1) -> Value:
    """exp(x) / sum(exp(x)) along ``axis``.

    Raises:
        ShapeError: there are no elements along ``axis``. DTypeError: ``x`` is not floating point.
    """
    return along_axis("softmax", softmax_p, x, axis)


def log_softmax(x: ArrayLike, axis: int = -1) -> Value:
    """x - log(sum(exp(x))) along ``axis``; errors as `softmax`."""
    return along_axis("log_softmax", log_softmax_p, x, axis)
