"""Scaled dot-product attention (A. Vaswani et al., "Attention is all you need", 2017).

Kernels compute it as T. Dao, "FlashAttention-2", 2023: block by block, with a running maximum and sum for each query.
No array of queries by keys is stored. The gradient computes the probabilities again from the logsumexp of each query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.batching_rules import loop, trailing_axes
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.precision import matmul_precision, precision_of
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.broadcasting import broadcast_to, promote, reshape
from adtrain.ops.common import ArrayLike, as_value, broadcast_shapes, require_float
from adtrain.ops.compare import where
from adtrain.ops.create import ones, zeros_like
from adtrain.ops.diagonals import tril
from adtrain.ops.matmul import matmul
from adtrain.ops.random import checked_state, uniform_numbers
from adtrain.ops.random import dropout as drop
from adtrain.ops.rounding import rounded
from adtrain.ops.shape import expand_dims, transpose
from adtrain.ops.softmax import softmax

MAX_WIDTH = 256
"""The largest head width. Kernels hold a block of rows of this width in registers or shared memory."""
HIDDEN = -1e30
"""The score of a key that a query does not attend to: its exponential is 0, and differences of scores are finite."""


def mask_and_rng(more: tuple[Any, ...]) -> tuple[Any, Any]:
    """The optional arguments of the primitives, by their dtypes: the mask and the random state, or None."""
    mask = next((x for x in more if x.dtype == np.bool_), None)
    return mask, next((x for x in more if x.dtype != np.bool_), None)


def _shape(q: Any, k: Any, v: Any, *more: Any, **params: Any) -> tuple[ArrayType, ArrayType]:
    require_float("attention", q, k, v)
    return ArrayType(q.shape, q.dtype), ArrayType(q.shape[:-1], q.dtype)


def _scores(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray | None, causal: bool, scale: float, precision: str
) -> np.ndarray:
    """q kᵀ scale, and -infinity where a query does not attend to a key."""
    scores = np.matmul(rounded(q, precision), rounded(k, precision).swapaxes(-1, -2)) * q.dtype.type(scale)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    return scores if mask is None else np.where(mask[..., None, :], scores, -np.inf)


def _dropped(x: np.ndarray, rng: np.ndarray | None, dropout: float, stream: int) -> np.ndarray:
    """`ops.dropout` of an array of queries by keys."""
    if rng is None:
        return x
    numbers = uniform_numbers(rng, x.shape, stream, np.dtype(np.float32))
    return np.where(numbers < np.float32(dropout), 0, x * x.dtype.type(1 / (1 - dropout)))


def _reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *more: np.ndarray,
    causal: bool,
    scale: float,
    dropout: float,
    stream: int,
    precision: str,
) -> tuple[np.ndarray, np.ndarray]:
    mask, rng = mask_and_rng(more)
    scores = _scores(q, k, mask, causal, scale, precision)
    top = np.max(scores, axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = np.sum(powers, axis=-1, keepdims=True)
    # A query without a key has the sum 0. Its output is 0; the probabilities exp(score - inf) of the gradient are too.
    powers = _dropped(powers / np.where(total == 0, 1, total), rng, dropout, stream)
    with np.errstate(divide="ignore"):
        logsumexp = np.where(total == 0, np.inf, np.log(total) + top)
    out = np.matmul(rounded(powers, precision), rounded(v, precision))
    return out.astype(q.dtype, copy=False), logsumexp[..., 0].astype(q.dtype, copy=False)


def _grad_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    logsumexp: np.ndarray,
    ct: np.ndarray,
    *more: np.ndarray,
    causal: bool,
    scale: float,
    dropout: float,
    stream: int,
    precision: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mask, rng = mask_and_rng(more)
    q, k, v, grad = (rounded(x, precision) for x in (q, k, v, ct))
    powers = np.exp(_scores(q, k, mask, causal, scale, precision) - logsumexp[..., None])
    by_powers = _dropped(np.matmul(grad, v.swapaxes(-1, -2)), rng, dropout, stream)
    by_scores = powers * (by_powers - np.sum(ct * out, axis=-1, keepdims=True)) * q.dtype.type(scale)
    by_scores = rounded(by_scores, precision)
    kept = rounded(_dropped(powers, rng, dropout, stream), precision)
    by_k, by_v = (np.matmul(x.swapaxes(-1, -2), y) for x, y in ((by_scores, q), (kept, grad)))
    return np.matmul(by_scores, k), by_k, by_v


def _composed(
    q: Value,
    k: Value,
    v: Value,
    *more: Value,
    causal: bool,
    scale: float,
    dropout: float,
    stream: int,
    precision: str,
) -> Value:
    """The output as a composition of operations, which store arrays of queries by keys."""
    mask, rng = mask_and_rng(more)
    allowed = None if mask is None else expand_dims(mask, -2)
    if causal:
        lower = tril(ones((q.shape[-2], k.shape[-2]), "int32", q.device)) > 0
        allowed = lower if allowed is None else allowed & lower
    with matmul_precision(precision):
        scores = matmul(q, k, transpose_b=True) * scale
        if allowed is not None:
            scores = where(allowed, scores, HIDDEN)
        powers = softmax(scores)
        if allowed is not None:  # of a query without a key, all powers are equal
            powers = where(allowed, powers, 0.0)
        return matmul(powers if rng is None else drop(powers, dropout, rng, stream), v)


def _rule(outs: Any, q: Value, k: Value, v: Value, *more: Value, **params: Any) -> Any:
    out, logsumexp = outs
    rest = (None,) * len(more)
    return lambda cts: (*bind(attention_grad_p, q, k, v, out, logsumexp, cts[0], *more, **params), *rest)


def _grad_rule(
    outs: Any, q: Value, k: Value, v: Value, out: Value, logsumexp: Value, ct: Value, *more: Value, **params: Any
) -> Any:
    """Of the gradient as a function of q, k, v and ct. `out` and `logsumexp` are functions of q, k and v as well."""

    def gradient(q: Value, k: Value, v: Value, ct: Value) -> Any:
        return vjp(lambda *x: _composed(*x, *more, **params), q, k, v)[1](ct)

    def pullback(cts: Any) -> tuple[Value | None, ...]:
        given = tuple(zeros_like(x) if c is None else c for x, c in zip((q, k, v), cts, strict=True))
        *by_inputs, by_ct = vjp(gradient, q, k, v, ct)[1](given)
        return (*by_inputs, None, None, by_ct, *(None,) * len(more))

    return pullback


def _batch(op: Any, mapped: Any, *args: Value, dropout: float, **params: Any) -> Any:
    """The members are one more leading axis. With dropout each draws its own numbers, so they run one by one."""
    return (loop if dropout else trailing_axes)(op, mapped, *args, dropout=dropout, **params)


def _pairs(q: Any, k: Any, causal: bool) -> int:
    """The number of pairs of a query and a key that it attends to, over all heads."""
    length = q.shape[-2]
    pairs = length * (length + 1) // 2 if causal else length * k.shape[-2]
    return math.prod(q.shape[:-2]) * pairs


def _flops(q: Any, k: Any, *more: Any, causal: bool, **params: Any) -> int:
    """Two products; scale, exponential, sum and division of each probability."""
    return _pairs(q, k, causal) * (4 * q.shape[-1] + 4)


def _grad_flops(q: Any, k: Any, *more: Any, causal: bool, **params: Any) -> int:
    """Five products, of which one computes the scores again; six operations for each probability."""
    return _pairs(q, k, causal) * (10 * q.shape[-1] + 6) + 2 * int(math.prod(q.shape))


attention_p: Primitive = Primitive("attention", _shape, _reference, flops=_flops, joint_vjp=_rule, batch=_batch)
"""Of q, k, v, then a mask (bool) and a random state (uint32) if there are any. The outputs are the result and the
logsumexp of the scores of each query, infinity for a query without a key."""

attention_grad_p: Primitive = Primitive(
    "attention_grad",
    lambda q, k, v, *more, **params: tuple(ArrayType(x.shape, x.dtype) for x in (q, k, v)),
    _grad_reference,
    flops=_grad_flops,
    joint_vjp=_grad_rule,
    batch=_batch,
)
"""The cotangents of q, k and v. The arguments are q, k, v, both outputs of `attention`, the cotangent of the first,
then mask and random state."""


def _self_shape(x: Any, *more: Any, heads: int, **params: Any) -> tuple[ArrayType, ArrayType]:
    require_float("self_attention", x)
    *leading, length, row = x.shape
    return ArrayType((*leading, length, row // 3), x.dtype), ArrayType((*leading, heads, length), x.dtype)


def _split(x: Any, heads: int, transposed: Any = np.transpose) -> list[Any]:
    """q, k and v, each (..., heads, length, width), of an array of `self_attention`."""
    *leading, length, row = x.shape
    by_head = x.reshape((math.prod(leading), length, 3, heads, row // (3 * heads)))
    parts = transposed(by_head, (2, 0, 3, 1, 4))
    return [parts[i] for i in range(3)]


def _heads_first(x: np.ndarray, heads: int) -> np.ndarray:
    """(..., length, heads * width) to (examples, heads, length, width)."""
    return x.reshape((-1, x.shape[-2], heads, x.shape[-1] // heads)).swapaxes(1, 2)


def _self_reference(x: np.ndarray, *more: np.ndarray, heads: int, **params: Any) -> tuple[np.ndarray, np.ndarray]:
    (out, logsumexp), (out_type, sums_type) = (
        _reference(*_split(x, heads), *more, **params),
        _self_shape(x, heads=heads),
    )
    return out.swapaxes(1, 2).reshape(out_type.shape), logsumexp.reshape(sums_type.shape)


def _self_grad_reference(
    x: np.ndarray, out: np.ndarray, logsumexp: np.ndarray, ct: np.ndarray, *more: np.ndarray, heads: int, **params: Any
) -> np.ndarray:
    by_head = _heads_first(out, heads), logsumexp.reshape((-1, *logsumexp.shape[-2:])), _heads_first(ct, heads)
    grads = np.stack(_grad_reference(*_split(x, heads), *by_head, *more, **params))
    return grads.transpose((1, 3, 0, 2, 4)).reshape(x.shape)


def _self_composed(x: Value, *more: Value, heads: int, **params: Any) -> Value:
    out = transpose(_composed(*_split(x, heads, transpose), *more, **params), (0, 2, 1, 3))
    return reshape(out, (*x.shape[:-1], x.shape[-1] // 3))


def _self_rule(outs: Any, x: Value, *more: Value, **params: Any) -> Any:
    out, logsumexp = outs
    rest = (None,) * len(more)
    return lambda cts: (bind(self_attention_grad_p, x, out, logsumexp, cts[0], *more, **params), *rest)


def _self_grad_rule(outs: Any, x: Value, out: Value, logsumexp: Value, ct: Value, *more: Value, **params: Any) -> Any:
    """As `_grad_rule`."""

    def gradient(x: Value, ct: Value) -> Any:
        return vjp(lambda x: _self_composed(x, *more, **params), x)[1](ct)[0]

    def pullback(given: Any) -> tuple[Value | None, ...]:
        by_x, by_ct = vjp(gradient, x, ct)[1](given)
        return (by_x, None, None, by_ct, *(None,) * len(more))

    return pullback


def _of_heads(flops: Callable[..., int]) -> Callable[..., int]:
    """The same for `self_attention` and its gradient."""

    def f(x: Any, *others: Any, heads: int, **params: Any) -> int:
        *leading, length, row = x.shape
        part = ArrayType((math.prod(leading), heads, length, row // (3 * heads)), x.dtype)
        return flops(part, part, **params)

    return f


self_attention_p: Primitive = Primitive(
    "self_attention", _self_shape, _self_reference, flops=_of_heads(_flops), joint_vjp=_self_rule
)
"""`attention` of an array (..., length, 3 heads width) with the rows of q, k and v side by side."""

self_attention_grad_p: Primitive = Primitive(
    "self_attention_grad",
    lambda x, *more, **params: ArrayType(x.shape, x.dtype),
    _self_grad_reference,
    flops=_of_heads(_grad_flops),
    joint_vjp=_self_grad_rule,
)


def self_attention(
    x: ArrayLike,
    heads: int,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: ArrayLike | None = None,
    stream: int = 0,
) -> Value:
    """`attention` of several heads whose q, k and v are side by side in one array, as one projection computes them.

    It reads and writes the array in place of copies that have the heads first.

    Args:
        x: (..., length, 3 heads width): the rows of q, then of k, then of v, each by head.
        causal, scale, dropout, rng, stream: as in `attention`. Dropout draws for (..., heads, length, length).

    Returns:
        (..., length, heads width).

    Raises:
        ShapeError: the last length is not a multiple of 3 heads, or there is no row. DTypeError: as `attention`.
    """
    value = as_value(x)
    require_float("self_attention", value)
    if heads < 1 or value.ndim < 2 or value.shape[-1] % (3 * heads) or value.shape[-2] == 0:
        raise ShapeError(
            f"self_attention: found shape {value.shape} and {heads} heads, expected (..., length, 3 heads width)"
        )
    width = value.shape[-1] // (3 * heads)
    more, params = _options("self_attention", width, causal, scale, dropout, rng, stream, value.dtype)
    return bind(self_attention_p, value, *more, heads=heads, **params)[0]


def _options(
    name: str,
    width: int,
    causal: bool,
    scale: float | None,
    dropout: float,
    rng: ArrayLike | None,
    stream: int,
    dtype: np.dtype,
) -> tuple[list[Value], dict[str, Any]]:
    """The random state, if there is one, and the parameters of a primitive."""
    if not 1 <= width <= MAX_WIDTH:
        raise ShapeError(f"{name}: found width {width}, expected 1 to {MAX_WIDTH}; use more heads")
    if not 0 <= dropout < 1:
        raise ShapeError(f"{name}: found dropout {dropout}, expected 0 <= dropout < 1")
    if dropout > 0 and rng is None:
        raise DTypeError(f"{name}: found dropout without rng, expected a random state; see ops.rng_state")
    states = [checked_state(name, rng, stream)] if dropout > 0 else []
    return states, {
        "causal": bool(causal),
        "scale": 1 / math.sqrt(width) if scale is None else float(scale),
        "dropout": float(dropout),
        "stream": stream,
        "precision": precision_of(dtype),
    }


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    causal: bool = False,
    scale: float | None = None,
    mask: ArrayLike | None = None,
    dropout: float = 0.0,
    rng: ArrayLike | None = None,
    stream: int = 0,
) -> Value:
    """softmax(q kᵀ scale) v, without an array of queries by keys in memory. Leading axes broadcast.

    The value and the first derivative are computed by blocks. Second derivatives store arrays of queries by keys.

    Args:
        q: (..., queries, width), width at most 256.
        k, v: (..., keys, width).
        causal: query i attends to keys 0 to i. There must be as many keys as queries.
        scale: 1 / sqrt(width) by default.
        mask: bool (..., keys), False for keys to ignore, such as padding. A query without a key gets zeros.
        dropout: the probability with which each softmax probability is set to 0; the others are divided by 1 - dropout.
        rng, stream: as in `dropout`.

    Returns:
        (..., queries, width).

    Raises:
        ShapeError: the shapes do not fit one another, or ``dropout`` is not in [0, 1).
        DTypeError: ``q``, ``k`` and ``v`` are not of floating point, ``mask`` is not bool, or ``rng`` is missing.
    """
    values = promote(q, k, v)
    require_float("attention", *values)
    shapes = [x.shape for x in values]
    if min(map(len, shapes)) < 2 or len({shape[-1] for shape in shapes}) > 1 or shapes[1][-2] != shapes[2][-2]:
        found = ", ".join(map(str, shapes))
        raise ShapeError(
            f"attention: found q, k, v of shapes {found}, expected (..., queries, width) and twice (..., keys, width)"
        )
    queries, keys = shapes[0][-2], shapes[1][-2]
    states, params = _options("attention", shapes[0][-1], causal, scale, dropout, rng, stream, values[0].dtype)
    if keys == 0:
        raise ShapeError(f"attention: found k of shape {shapes[1]}, expected at least one key")
    if causal and queries != keys:
        raise ShapeError(f"attention: found {queries} queries and {keys} keys, expected equal numbers with causal")
    leading = broadcast_shapes("attention", *(shape[:-2] for shape in shapes))
    more = []
    if mask is not None:
        value = mask if isinstance(mask, Value) else array(mask, device=values[0].device)
        if value.dtype != np.bool_:
            raise DTypeError(f"attention: found a mask of {value.dtype}, expected bool, False for keys to ignore")
        if value.shape[-1:] != (keys,) or broadcast_shapes("attention", value.shape[:-1], leading) != leading:
            raise ShapeError(f"attention: found a mask of shape {value.shape}, expected {(*leading, keys)}")
        more.append(broadcast_to(value, (*leading, keys)))
    rows = (broadcast_to(x, (*leading, *x.shape[-2:])) for x in values)
    return bind(attention_p, *rows, *more, *states, **params)[0]
