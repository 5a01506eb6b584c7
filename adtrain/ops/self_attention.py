"""Attention of several heads whose q, k and v lie side by side in one array, as one projection computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.axes import Axes, whole
from adtrain.core.errors import ShapeError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops import attention_reference
from adtrain.ops.attention import (
    composed,
    composed_gradient,
    first_keys,
    forward_flops,
    grad_flops,
    gradient_rule,
    parameters,
)
from adtrain.ops.broadcasting import reshape
from adtrain.ops.common import ArrayLike, as_value, require_float
from adtrain.ops.random import Stream
from adtrain.ops.shape import transpose
from adtrain.option_types import Fraction, Number, Positive, Size


def _shape(x: Any, *more: Any, heads: int, **params: Any) -> tuple[ArrayType, ArrayType]:
    require_float("self_attention", x)
    *leading, length, row = x.shape
    return ArrayType((*leading, length, row // 3), x.dtype), ArrayType((*leading, heads, length), x.dtype)


def _split(x: Any, heads: int, transposed: Any = np.transpose) -> list[Any]:
    """q, k and v, each (..., heads, length, width), of an array of `self_attention`."""
    *leading, length, row = x.shape
    by_head = x.reshape((math.prod(leading), length, 3, heads, row // (3 * heads)))
    parts = transposed(by_head, (2, 0, 3, 1, 4))
    return [parts[i] for i in range(3)]


def _for_heads(more: tuple[Any, ...]) -> tuple[Any, ...]:
    """The optional arguments for all heads of the examples: starts (..., length) become (examples, 1, length)."""
    return tuple(x.reshape((-1, 1, x.shape[-1])) if x.dtype == np.int32 else x for x in more)


def _heads_first(x: np.ndarray, heads: int) -> np.ndarray:
    """(..., length, heads * width) to (examples, heads, length, width)."""
    return x.reshape((-1, x.shape[-2], heads, x.shape[-1] // heads)).swapaxes(1, 2)


def _reference(x: np.ndarray, *more: np.ndarray, heads: int, **params: Any) -> tuple[np.ndarray, np.ndarray]:
    out, logsumexp = attention_reference.attention(*_split(x, heads), *_for_heads(more), **params)
    out_type, sums_type = _shape(x, heads=heads)
    return out.swapaxes(1, 2).reshape(out_type.shape), logsumexp.reshape(sums_type.shape)


def _grad_reference(
    x: np.ndarray, out: np.ndarray, logsumexp: np.ndarray, ct: np.ndarray, *more: np.ndarray, heads: int, **params: Any
) -> np.ndarray:
    by_head = _heads_first(out, heads), logsumexp.reshape((-1, *logsumexp.shape[-2:])), _heads_first(ct, heads)
    grads = np.stack(attention_reference.attention_grad(*_split(x, heads), *by_head, *_for_heads(more), **params))
    return grads.transpose((1, 3, 0, 2, 4)).reshape(x.shape)


def _composed_heads(x: Value, *more: Value, heads: int, **params: Any) -> Value:
    out = transpose(composed(*_split(x, heads, transpose), *_for_heads(more), **params), (0, 2, 1, 3))
    return reshape(out, (*x.shape[:-1], x.shape[-1] // 3))


def _rule(outs: Any, x: Value, *more: Value, **params: Any) -> Any:
    out, logsumexp = outs
    rest = (None,) * len(more)
    return lambda cts: (bind(self_attention_grad_p, x, out, logsumexp, cts[0], *more, **params), *rest)


def _of_heads(flops: Callable[..., int]) -> Callable[..., int]:
    """The same for `self_attention` and its gradient."""

    def f(x: Any, *others: Any, heads: int, **params: Any) -> int:
        *leading, length, row = x.shape
        part = ArrayType((math.prod(leading), heads, length, row // (3 * heads)), x.dtype)
        return flops(part, part, **params)

    return f


def _axes(x: Any, *more: Any, dropout: float, **params: Any) -> str | Axes:
    """Dropout draws a number for each position. Heads, columns and rows of a sequence are read in other ways."""
    masks = ",*." * len(more)
    return whole([x.ndim for x in (x, *more)], [x.ndim, x.ndim]) if dropout else f"*..{masks}->*..,*.."


def _grad_axes(x: Any, *more: Any, dropout: float, **params: Any) -> str | Axes:
    masks = ",*." * (len(more) - 3)
    return whole([x.ndim for x in (x, *more)], [x.ndim]) if dropout else f"*..,*..,*..,*..{masks}->*.."


self_attention_p: Primitive = Primitive(
    "self_attention",
    _shape,
    _reference,
    flops=_of_heads(forward_flops),
    joint_vjp=_rule,
    composition=_composed_heads,
    axes=_axes,
)
"""`attention` of an array (..., length, 3 heads width) with the rows of q, k and v side by side."""

self_attention_grad_p: Primitive = Primitive(
    "self_attention_grad",
    lambda x, *more, **params: ArrayType(x.shape, x.dtype),
    _grad_reference,
    flops=_of_heads(grad_flops),
    joint_vjp=gradient_rule(_composed_heads, 1),
    composition=composed_gradient(_composed_heads, 1),
    axes=_grad_axes,
)


@checked_options
def self_attention(
    x: ArrayLike,
    heads: Size,
    causal: bool = False,
    scale: Number | None = None,
    dropout: Fraction = 0.0,
    rng: ArrayLike | None = None,
    stream: Stream = 0,
    window: Size | None = None,
    soft_cap: Positive | None = None,
    starts: ArrayLike | None = None,
) -> Value:
    """`attention` of several heads whose q, k and v are side by side in one array, as one projection computes them.

    It reads and writes the array in place of copies that have the heads first.

    Args:
        x: (..., length, 3 heads width): the rows of q, then of k, then of v, each by head.
        causal, scale, dropout, rng, stream, window, soft_cap, starts: as in `attention`. Dropout draws for (..., heads,
            length, length). All heads have the same starts (..., length).

    Returns:
        (..., length, heads width).

    Raises:
        ShapeError: the last length is not a multiple of 3 heads, or there is no row.
        OptionError, DTypeError: as `attention`.
    """
    value = as_value(x)
    require_float("self_attention", value)
    if value.ndim < 2 or value.shape[-1] % (3 * heads) or value.shape[-2] == 0:
        raise ShapeError(
            f"self_attention: found shape {value.shape} and {heads} heads, expected (..., length, 3 heads width)"
        )
    width = value.shape[-1] // (3 * heads)
    more, params = parameters("self_attention", width, causal, scale, dropout, rng, stream, value.dtype)
    if starts is not None:
        more.insert(0, first_keys("self_attention", starts, value.shape[:-1], causal, window, value.device))
        window = None
    if window is not None or soft_cap is not None:
        return _composed_heads(value, *more, heads=heads, **params, window=window, soft_cap=soft_cap)
    return bind(self_attention_p, value, *more, heads=heads, **params)[0]
