"""Scaled dot-product attention (A. Vaswani et al., "Attention is all you need", 2017).

Kernels compute it as T. Dao, "FlashAttention-2", 2023: block by block, with a running maximum and sum for each query.
No array of queries by keys is stored. The gradient computes the probabilities again from the logsumexp of each query.

`self_attention` is the same for q, k and v side by side in one array, which it reads without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.axes import Axes, whole
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.core.options import checked_options
from adtrain.core.precision import matmul_precision, precision_of, rounded
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.ops.common import ArrayLike, as_value, broadcast_shapes, broadcast_to, promote, require_float, reshape
from adtrain.ops.compare import equal, greater_equal, maximum, where
from adtrain.ops.create import Stream, arange, checked_state, ones, uniform_numbers
from adtrain.ops.create import dropout as drop
from adtrain.ops.elementwise import tanh
from adtrain.ops.matmul import matmul
from adtrain.ops.rearrange import tril
from adtrain.ops.reduce import softmax
from adtrain.ops.shape import concatenate, expand_dims, pad, transpose
from adtrain.option_types import Fraction, Number, Positive, Size

__all__ = ["attention", "self_attention"]


class OptionalArguments(NamedTuple):
    """The optional arguments of the primitives, or None: mask, first keys, random state."""

    mask: Any
    starts: Any
    rng: Any


def optional_arguments(more: tuple[Any, ...]) -> OptionalArguments:
    """The optional arguments by their dtypes, which are bool, int32 and uint32 in this order."""
    return OptionalArguments(*(next((x for x in more if x.dtype.kind == kind), None) for kind in "biu"))


def _scores(
    q: np.ndarray, k: np.ndarray, given: OptionalArguments, causal: bool, scale: float, precision: str
) -> np.ndarray:
    """q kᵀ scale, and -infinity where a query does not attend to a key."""
    scores = np.matmul(rounded(q, precision), rounded(k, precision).swapaxes(-1, -2)) * q.dtype.type(scale)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    if given.starts is not None:
        scores = np.where(np.arange(scores.shape[-1]) >= given.starts[..., None], scores, -np.inf)
    return scores if given.mask is None else np.where(given.mask[..., None, :], scores, -np.inf)


def _dropped(x: np.ndarray, rng: np.ndarray | None, dropout: float, stream: int) -> np.ndarray:
    """`ops.dropout` of an array of queries by keys."""
    if rng is None:
        return x
    numbers = uniform_numbers(rng, x.shape, stream, np.dtype(np.float32))
    return np.where(numbers < np.float32(dropout), 0, x * x.dtype.type(1 / (1 - dropout)))


def attention_reference(
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
    """The output, and the logsumexp of the scores of each query."""
    given = optional_arguments(more)
    scores = _scores(q, k, given, causal, scale, precision)
    top = np.max(scores, axis=-1, keepdims=True)
    probabilities = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = np.sum(probabilities, axis=-1, keepdims=True)
    # A query without a key has the sum 0. Its output is 0; the probabilities exp(score - inf) of the gradient are too.
    probabilities = _dropped(probabilities / np.where(total == 0, 1, total), given.rng, dropout, stream)
    with np.errstate(divide="ignore"):
        logsumexp = np.where(total == 0, np.inf, np.log(total) + top)
    out = np.matmul(rounded(probabilities, precision), rounded(v, precision))
    return out.astype(q.dtype, copy=False), logsumexp[..., 0].astype(q.dtype, copy=False)


def attention_grad_reference(
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
    """The cotangents of q, k and v."""
    given = optional_arguments(more)
    q, k, v, grad = (rounded(x, precision) for x in (q, k, v, ct))
    probabilities = np.exp(_scores(q, k, given, causal, scale, precision) - logsumexp[..., None])
    ct_probabilities = _dropped(np.matmul(grad, v.swapaxes(-1, -2)), given.rng, dropout, stream)
    ct_scores = probabilities * (ct_probabilities - np.sum(ct * out, axis=-1, keepdims=True)) * q.dtype.type(scale)
    ct_scores = rounded(ct_scores, precision)
    kept = rounded(_dropped(probabilities, given.rng, dropout, stream), precision)
    ct_k, ct_v = (np.matmul(x.swapaxes(-1, -2), y) for x, y in ((ct_scores, q), (kept, grad)))
    return np.matmul(ct_scores, k), ct_k, ct_v


MAX_WIDTH = 256
"""The largest head width. Kernels hold a block of rows of this width in registers or shared memory."""
EXCLUDED = -1e30
"""The score of a key that a query does not attend to: its exponential is 0, and differences of scores are finite."""


def _shape(q: Any, k: Any, v: Any, *more: Any, **params: Any) -> tuple[ArrayType, ArrayType]:
    require_float("attention", q, k, v)
    return ArrayType(q.shape, q.dtype), ArrayType(q.shape[:-1], q.dtype)


def composed(
    q: Value,
    k: Value,
    v: Value,
    *more: Value,
    causal: bool,
    scale: float,
    dropout: float,
    stream: int,
    precision: str,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Value:
    """The output as a composition of operations, which store arrays of queries by keys."""
    mask, starts, rng = optional_arguments(more)
    length, reach = q.shape[-2], 2 if causal else 3
    allowed: Value | None
    if blocked := (window is not None and mask is None and starts is None and reach * window < length):
        assert window is not None
        q, k, v, allowed = _blocks(q, k, v, causal, window)
    else:
        allowed = None if mask is None else expand_dims(mask, -2)
        if causal or window is not None:
            near = _near(length, k.shape[-2], causal, window, q.device)
            allowed = near if allowed is None else allowed & near
        if starts is not None:
            same = greater_equal(arange(k.shape[-2], device=q.device), expand_dims(starts, -1))
            allowed = same if allowed is None else allowed & same
    with matmul_precision(precision):
        scores = matmul(q, k, transpose_b=True) * scale
        if soft_cap is not None:
            scores = tanh(scores * (1 / soft_cap)) * soft_cap
        if allowed is not None:
            scores = where(allowed, scores, EXCLUDED)
        probabilities = softmax(scores)
        if allowed is not None:  # without a key, all probabilities of a query are equal
            probabilities = where(allowed, probabilities, 0.0)
        out = matmul(probabilities if rng is None else drop(probabilities, dropout, rng, stream), v)
    if not blocked:
        return out
    joined = reshape(out, (*out.shape[:-3], out.shape[-3] * out.shape[-2], out.shape[-1]))
    return joined[..., :length, :]


def _near(queries: int, keys: int, causal: bool, window: int | None, device: str) -> Value:
    """Which keys a query attends to by their positions: bool (queries, keys)."""
    every = ones((queries, keys), "int32", device)
    near = (tril(every) if causal else every) > 0
    if window is None or window >= keys:
        return near
    near = near & equal(tril(every, -window), 0)
    return near if causal else near & (tril(every, window - 1) > 0)


def _blocks(q: Value, k: Value, v: Value, causal: bool, window: int) -> tuple[Value, Value, Value, Value]:
    """Queries in blocks of `window`, each with its keys and values, and which of these a query attends to.

    A query is near the keys of its own block and of the one before; without `causal` also of the one after. So arrays
    of scores have two or three times `window` columns.

    Returns:
        q (..., blocks, window, width), k and v (..., blocks, columns, width), bool (blocks, window, columns).
    """
    length = q.shape[-2]
    count = -(-length // window)

    def blocks(x: Value) -> Value:
        widths = [(0, 0)] * (x.ndim - 2) + [(0, count * window - length), (0, 0)]
        return reshape(pad(x, widths), (*x.shape[:-2], count, window, x.shape[-1]))

    def with_neighbours(x: Value) -> Value:
        ends = [(0, 0)] * (x.ndim - 3) + [(1, 0 if causal else 1), (0, 0), (0, 0)]
        padded = pad(x, ends)
        parts = [padded[..., i : i + count, :, :] for i in range(2 if causal else 3)]
        return concatenate(parts, axis=-2)

    starts = np.arange(count)[:, None, None] * window
    query = starts + np.arange(window)[:, None]
    key = starts - window + np.arange((2 if causal else 3) * window)
    near = (key >= 0) & (key < length) & (np.abs(query - key) < window) & ((key <= query) | (not causal))
    allowed = array(near, device=q.device)
    return blocks(q), with_neighbours(blocks(k)), with_neighbours(blocks(v)), allowed


def _rule(outs: Any, q: Value, k: Value, v: Value, *more: Value, **params: Any) -> Any:
    out, logsumexp = outs
    rest = (None,) * len(more)
    return lambda cts: (*bind(attention_grad_p, q, k, v, out, logsumexp, cts[0], *more, **params), *rest)


def composed_gradient(f: Callable[..., Value], inputs: int) -> Callable[..., Any]:
    """A gradient primitive as a composition. Its arguments are the inputs of ``f``, both outputs of the forward
    primitive, the cotangent `ct` of the first, then the optional arguments. ``f`` computes the outputs again.
    """

    def gradient(*args: Value, **params: Any) -> Any:
        found = vjp(lambda *x: f(*x, *args[inputs + 3 :], **params), *args[:inputs])[1](args[inputs + 2])
        return found if inputs > 1 else found[0]

    return gradient


def _axes(q: Any, k: Any, v: Any, *more: Any, causal: bool, dropout: float, **params: Any) -> str | Axes:
    """Dropout draws a number for each position, and a causal query attends to keys up to its own position."""
    if dropout:
        return whole([x.ndim for x in (q, k, v, *more)], [q.ndim, q.ndim - 1])
    query = "." if causal else "q"
    return f"*{query}.,*..,*.v{',*.' * len(more)}->*{query}v,*{query}"


def _grad_axes(q: Any, k: Any, v: Any, *more: Any, causal: bool, dropout: float, **params: Any) -> str | Axes:
    if dropout:
        return whole([x.ndim for x in (q, k, v, *more)], [x.ndim for x in (q, k, v)])
    query, key = (".", ".") if causal else ("q", "k")
    masks = f",*{key}" * (len(more) - 3)
    return f"*{query}.,*{key}.,*{key}.,*{query}.,*{query},*{query}.{masks}->*{query}.,*{key}.,*{key}."


def _pairs(q: Any, k: Any, causal: bool) -> int:
    """The number of pairs of a query and a key that it attends to, over all heads."""
    length = q.shape[-2]
    pairs = length * (length + 1) // 2 if causal else length * k.shape[-2]
    return math.prod(q.shape[:-2]) * pairs


def forward_flops(q: Any, k: Any, *more: Any, causal: bool, **params: Any) -> int:
    """Two products; scale, exponential, sum and division of each probability."""
    return _pairs(q, k, causal) * (4 * q.shape[-1] + 4)


def grad_flops(q: Any, k: Any, *more: Any, causal: bool, **params: Any) -> int:
    """Five products, of which one computes the scores again; six operations for each probability."""
    return _pairs(q, k, causal) * (10 * q.shape[-1] + 6) + 2 * int(math.prod(q.shape))


attention_p: Primitive = Primitive(
    "attention",
    _shape,
    attention_reference,
    flops=forward_flops,
    joint_vjp=_rule,
    axes=_axes,
    composition=composed,
)
"""The arguments are q, k, v, then a mask (bool), first keys (int32) and a random state (uint32), if there are any. The
outputs are the result and the logsumexp of the scores of each query, infinity for a query without a key."""

attention_grad_p: Primitive = Primitive(
    "attention_grad",
    lambda q, k, v, *more, **params: tuple(ArrayType(x.shape, x.dtype) for x in (q, k, v)),
    attention_grad_reference,
    flops=grad_flops,
    composition=composed_gradient(composed, 3),
    axes=_grad_axes,
)
"""The cotangents of q, k and v. The arguments are q, k, v, both outputs of `attention`, the cotangent of the first,
then the optional ones."""


def parameters(
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
    if dropout > 0 and rng is None:
        raise DTypeError(f"{name}: found dropout without rng, expected a random state; see ops.rng_state")
    states = [checked_state(name, rng)] if dropout > 0 else []
    return states, {
        "causal": bool(causal),
        "scale": 1 / math.sqrt(width) if scale is None else float(scale),
        "dropout": float(dropout),
        "stream": stream,
        "precision": precision_of(dtype),
    }


def first_keys(
    name: str, starts: ArrayLike, shape: Shape, causal: bool, window: int | None, device: str | None
) -> Value:
    """The first key of each query within its document, and within ``window``: int32 of ``shape`` on ``device``."""
    found = as_value(starts, device)
    if not causal:
        raise OptionError(f"{name}: found starts without causal, expected both")
    if found.dtype != np.int32:
        raise DTypeError(f"{name}: found starts of {found.dtype}, expected int32")
    pairs = list(zip(found.shape[::-1], shape[::-1], strict=False))
    if found.ndim > len(shape) or found.shape[-1:] != shape[-1:] or any(n not in (1, size) for n, size in pairs):
        raise ShapeError(f"{name}: found starts of shape {found.shape}, expected {shape}")
    if window is not None:
        found = maximum(found, arange(1 - window, shape[-1] + 1 - window, dtype="int32", device=found.device))
    return broadcast_to(found, shape)


@checked_options
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    causal: bool = False,
    scale: Number | None = None,
    mask: ArrayLike | None = None,
    dropout: Fraction = 0.0,
    rng: ArrayLike | None = None,
    stream: Stream = 0,
    window: Size | None = None,
    soft_cap: Positive | None = None,
    starts: ArrayLike | None = None,
) -> Value:
    """softmax(q kᵀ scale) v, without an array of queries by keys in memory. Leading axes broadcast.

    The value and the first derivative are computed by blocks. Second derivatives store arrays of queries by keys, and
    so does everything with ``soft_cap``, or with ``window`` and no ``starts``: no kernel has them. With ``window`` and
    no ``mask`` the arrays have two or three times ``window`` columns.

    Args:
        q: (..., queries, width), width at most 256.
        k, v: (..., keys, width).
        causal: query i attends to keys 0 to i. There must be as many keys as queries.
        scale: 1 / sqrt(width) by default.
        mask: bool (..., keys), False for keys to ignore, such as padding. A query without a key gets zeros.
        dropout: the probability with which each softmax probability is set to 0; the others are divided by 1 - dropout.
        rng, stream: as in `dropout`.
        window: query i attends to keys i - window + 1 to i + window - 1; with ``causal`` to i. There must be as many
            keys as queries.
        soft_cap: scores s become soft_cap tanh(s / soft_cap), so that none is larger.
        starts: int32 (..., queries), with ``causal``: query i attends to keys starts[i] to i. The numbers do not
            decrease along a sequence. So documents that share a sequence attend to themselves only.

    Returns:
        (..., queries, width).

    Raises:
        ShapeError: the shapes do not fit one another.
        OptionError: ``causal`` is no bool, ``scale`` no number, ``dropout`` no number in [0, 1), ``window`` no positive
            integer, ``soft_cap`` no positive number, or there are ``starts`` without ``causal``.
        DTypeError: ``q``, ``k`` and ``v`` are not of floating point, ``mask`` is not bool, ``starts`` are not int32, or
            ``rng`` is missing.
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
    states, params = parameters("attention", shapes[0][-1], causal, scale, dropout, rng, stream, values[0].dtype)
    if keys == 0:
        raise ShapeError(f"attention: found k of shape {shapes[1]}, expected at least one key")
    if queries != keys and (causal or window is not None):
        option = "causal" if causal else "window"
        raise ShapeError(f"attention: found {queries} queries and {keys} keys, expected equal numbers with {option}")
    leading = broadcast_shapes("attention", *(shape[:-2] for shape in shapes))
    more = []
    if mask is not None:
        value = as_value(mask, values[0].device)
        if value.dtype != np.bool_:
            raise DTypeError(f"attention: found a mask of {value.dtype}, expected bool, False for keys to ignore")
        sizes = (*leading, keys)
        pairs = zip(value.shape[:-1][::-1], leading[::-1], strict=False)
        if value.shape[-1:] != (keys,) or value.ndim > len(sizes) or any(n not in (1, size) for n, size in pairs):
            expected = f"expected {sizes}, with a number for each key and no axis of queries"
            raise ShapeError(f"attention: found a mask of shape {value.shape}, {expected}")
        more.append(broadcast_to(value, (*leading, keys)))
    if starts is not None:
        more.append(first_keys("attention", starts, (*leading, queries), causal, window, values[0].device))
        window = None
    rows = [broadcast_to(x, (*leading, *x.shape[-2:])) for x in values]
    if window is not None or soft_cap is not None:
        return composed(rows[0], rows[1], rows[2], *more, *states, **params, window=window, soft_cap=soft_cap)
    return bind(attention_p, *rows, *more, *states, **params)[0]


def _side_by_side_shape(x: Any, *more: Any, heads: int, **params: Any) -> tuple[ArrayType, ArrayType]:
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


def _side_by_side_reference(
    x: np.ndarray, *more: np.ndarray, heads: int, **params: Any
) -> tuple[np.ndarray, np.ndarray]:
    out, logsumexp = attention_reference(*_split(x, heads), *_for_heads(more), **params)
    out_type, sums_type = _side_by_side_shape(x, heads=heads)
    return out.swapaxes(1, 2).reshape(out_type.shape), logsumexp.reshape(sums_type.shape)


def _side_by_side_grad_reference(
    x: np.ndarray, out: np.ndarray, logsumexp: np.ndarray, ct: np.ndarray, *more: np.ndarray, heads: int, **params: Any
) -> np.ndarray:
    by_head = _heads_first(out, heads), logsumexp.reshape((-1, *logsumexp.shape[-2:])), _heads_first(ct, heads)
    grads = np.stack(attention_grad_reference(*_split(x, heads), *by_head, *_for_heads(more), **params))
    return grads.transpose((1, 3, 0, 2, 4)).reshape(x.shape)


def _composed_heads(x: Value, *more: Value, heads: int, **params: Any) -> Value:
    out = transpose(composed(*_split(x, heads, transpose), *_for_heads(more), **params), (0, 2, 1, 3))
    return reshape(out, (*x.shape[:-1], x.shape[-1] // 3))


def _side_by_side_rule(outs: Any, x: Value, *more: Value, **params: Any) -> Any:
    out, logsumexp = outs
    rest = (None,) * len(more)
    return lambda cts: (bind(self_attention_grad_p, x, out, logsumexp, cts[0], *more, **params), *rest)


def _of_heads(flops: Callable[..., int]) -> Callable[..., int]:
    """The function `flops` of attention as one of `self_attention`, or of its gradient."""

    def f(x: Any, *others: Any, heads: int, **params: Any) -> int:
        *leading, length, row = x.shape
        part = ArrayType((math.prod(leading), heads, length, row // (3 * heads)), x.dtype)
        return flops(part, part, **params)

    return f


def _side_by_side_axes(x: Any, *more: Any, dropout: float, **params: Any) -> str | Axes:
    """Dropout draws a number for each position. Heads, columns and rows of a sequence are read in other ways."""
    masks = ",*." * len(more)
    return whole([x.ndim for x in (x, *more)], [x.ndim, x.ndim]) if dropout else f"*..{masks}->*..,*.."


def _side_by_side_grad_axes(x: Any, *more: Any, dropout: float, **params: Any) -> str | Axes:
    masks = ",*." * (len(more) - 3)
    return whole([x.ndim for x in (x, *more)], [x.ndim]) if dropout else f"*..,*..,*..,*..{masks}->*.."


self_attention_p: Primitive = Primitive(
    "self_attention",
    _side_by_side_shape,
    _side_by_side_reference,
    flops=_of_heads(forward_flops),
    joint_vjp=_side_by_side_rule,
    composition=_composed_heads,
    axes=_side_by_side_axes,
)
"""`attention` of an array (..., length, 3 heads width) with the rows of q, k and v side by side."""

self_attention_grad_p: Primitive = Primitive(
    "self_attention_grad",
    lambda x, *more, **params: ArrayType(x.shape, x.dtype),
    _side_by_side_grad_reference,
    flops=_of_heads(grad_flops),
    composition=composed_gradient(_composed_heads, 1),
    axes=_side_by_side_grad_axes,
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
