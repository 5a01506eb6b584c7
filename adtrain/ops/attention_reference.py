"""NumPy references of attention and its gradient; see `ops.attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from adtrain.ops.random import uniform_numbers
from adtrain.ops.rounding import rounded


class Optional(NamedTuple):
    """The optional arguments of the primitives, or None: mask, first keys, random state."""

    mask: Any
    starts: Any
    rng: Any


def optional(more: tuple[Any, ...]) -> Optional:
    """The optional arguments, told by their dtypes: bool, int32 and uint32."""
    return Optional(*(next((x for x in more if x.dtype.kind == kind), None) for kind in "biu"))


def _scores(q: np.ndarray, k: np.ndarray, given: Optional, causal: bool, scale: float, precision: str) -> np.ndarray:
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


def attention(
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
    given = optional(more)
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


def attention_grad(
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
    given = optional(more)
    q, k, v, grad = (rounded(x, precision) for x in (q, k, v, ct))
    probabilities = np.exp(_scores(q, k, given, causal, scale, precision) - logsumexp[..., None])
    ct_probabilities = _dropped(np.matmul(grad, v.swapaxes(-1, -2)), given.rng, dropout, stream)
    ct_scores = probabilities * (ct_probabilities - np.sum(ct * out, axis=-1, keepdims=True)) * q.dtype.type(scale)
    ct_scores = rounded(ct_scores, precision)
    kept = rounded(_dropped(probabilities, given.rng, dropout, stream), precision)
    ct_k, ct_v = (np.matmul(x.swapaxes(-1, -2), y) for x, y in ((ct_scores, q), (kept, grad)))
    return np.matmul(ct_scores, k), ct_k, ct_v
