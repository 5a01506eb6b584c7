"""Cases of layers and losses, of random numbers, of empty batches, and of `custom_vjp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.cases.table import case
from adtrain.core.array import Value
from adtrain.core.autodiff import grad
from adtrain.core.custom import custom_vjp
from adtrain.core.vmap import vmap
from adtrain.ops.create import full
from adtrain.samplers import Sampler, apart, between, distinct, integers, normal, rng_state, short

# Convolution and pooling.
_CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 6, 5), (4, 3, 3, 2), {}),
    "stride and padding": ((2, 2, 7, 6), (3, 2, 3, 3), {"stride": (2, 3), "padding": (1, 2)}),
    "dilation": ((1, 2, 8, 7), (3, 2, 3, 2), {"dilation": (2, 3), "padding": 1}),
    "groups": ((2, 4, 5, 5), (6, 2, 2, 2), {"groups": 2, "stride": 2}),
    "depthwise": ((2, 3, 5, 5), (3, 1, 3, 3), {"groups": 3, "padding": 1}),
    "one pixel": ((2, 3, 1, 1), (4, 3, 1, 1), {}),
    "rows left over": ((1, 1, 6, 8), (2, 1, 3, 3), {"stride": 4}),
    "empty batch": ((0, 3, 5, 5), (4, 3, 3, 3), {}),
}
for _name, (_x, _w, _options) in _CONVOLUTIONS.items():
    case("conv2d", _name, lambda x, w, o=_options: ops.conv2d(x, w, **o), normal(*_x), normal(*_w), linear=(0, 1))
    if _name in ("stride and padding", "groups"):
        for _p in ("tf32", "bfloat16"):
            case("conv2d", f"{_name}, {_p}", lambda x, w, o=_options: ops.conv2d(x, w, **o), short(*_x), short(*_w),
                 linear=(0, 1), precision=_p)  # fmt: skip
case("conv2d", "bias", lambda x, w, b: ops.conv2d(x, w, b), normal(2, 3, 4, 4), normal(5, 3, 3, 3), normal(5))


def _weight_gradients(x: Value, g: Value, groups: int) -> Value:
    """The gradient by the weights of a convolution of each image, for the cotangents g."""
    weights = full((g.shape[1], x.shape[1] // groups, 3, 2), 0.0, g.dtype, g.device)

    def of_image(x: Value, g: Value) -> Value:
        return grad(lambda w: ops.sum(ops.conv2d(x[None], w, stride=(2, 1), padding=1, groups=groups)[0] * g))(weights)

    return vmap(of_image)(x, g)


for _groups in (1, 2):
    case("conv2d", f"weight gradients of images, {_groups} groups", lambda x, g, n=_groups: _weight_gradients(x, g, n),
         normal(3, 2, 5, 4), normal(3, 4, 3, 5), linear=(0, 1))  # fmt: skip
case("conv_transpose2d", "stride", lambda x, w, b: ops.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
     normal(2, 3, 3, 4), normal(3, 2, 3, 3), normal(2))  # fmt: skip
case("conv_transpose2d", "groups", lambda x, w: ops.conv_transpose2d(x, w, stride=(1, 2), groups=2, dilation=2),
     normal(1, 4, 3, 3), normal(4, 2, 2, 3), linear=(0, 1))  # fmt: skip
case("conv1d", "stride", lambda x, w, b: ops.conv1d(x, w, b, 2, 1, 2), normal(2, 3, 7), normal(4, 3, 2), normal(4))
case(
    "conv2d",
    "same",
    lambda x, w: ops.conv2d(x, w, padding="same"),
    normal(2, 2, 4, 3),
    normal(3, 2, 2, 3),
    linear=(0, 1),
)
case(
    "conv2d",
    "unequal padding",
    lambda x, w: ops.conv2d(x, w, padding=((0, 1), (2, 1))),
    normal(2, 2, 4, 3),
    normal(3, 2, 2, 3),
    linear=(0, 1),
)
case(
    "conv3d",
    "groups",
    lambda x, w: ops.conv3d(x, w, None, (2, 1, 2), (1, 0, 1), (1, 2, 1), 2),
    normal(1, 4, 4, 5, 4),
    normal(2, 2, 2, 2, 3),
    linear=(0, 1),
)
case(
    "conv_transpose1d",
    "stride",
    lambda x, w: ops.conv_transpose1d(x, w, None, 2, 1, 1),
    normal(2, 3, 4),
    normal(3, 2, 3),
    linear=(0, 1),
)
case(
    "conv_transpose3d",
    "groups",
    lambda x, w: ops.conv_transpose3d(x, w, None, 2, (1, 0, 1), (1, 0, 0), 2),
    normal(1, 4, 2, 3, 2),
    normal(4, 1, 3, 2, 3),
    linear=(0, 1),
)
case("max_pool2d", "disjoint", lambda x: ops.max_pool2d(x, 2), distinct(2, 3, 5, 4))
case("max_pool2d", "overlapping, padded", lambda x: ops.max_pool2d(x, 3, stride=2, padding=1), distinct(2, 2, 6, 5))
case("avg_pool2d", "disjoint", lambda x: ops.avg_pool2d(x, 2), normal(2, 3, 5, 4), linear=(0,))
case("avg_pool2d", "overlapping, padded", lambda x: ops.avg_pool2d(x, (3, 2), 2, 1), normal(2, 2, 6, 5), linear=(0,))
case("max_pool1d", "padded", lambda x: ops.max_pool1d(x, 3, 2, 1), distinct(2, 3, 7))
case("max_pool2d", "dilated", lambda x: ops.max_pool2d(x, 2, 1, dilation=(2, 1)), distinct(2, 2, 5, 4))
case("max_pool2d", "partial windows", lambda x: ops.max_pool2d(x, 2, ceil_mode=True), distinct(2, 2, 5, 3))
case("max_pool2d", "same", lambda x: ops.max_pool2d(x, 2, 1, "same"), distinct(2, 2, 3, 4))
case("max_pool2d", "positions", lambda x: ops.max_pool2d(x, 2, return_indices=True)[0], distinct(2, 2, 4, 4))
case("max_pool3d", "padded", lambda x: ops.max_pool3d(x, (2, 3, 2), 2, (1, 1, 0)), distinct(1, 2, 4, 5, 4))
case("avg_pool1d", "padded", lambda x: ops.avg_pool1d(x, 3, 2, 1), normal(2, 3, 7), linear=(0,))
case(
    "avg_pool2d",
    "partial windows",
    lambda x: ops.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    normal(2, 2, 6, 5),
    linear=(0,),
)
case("avg_pool2d", "divisor", lambda x: ops.avg_pool2d(x, 2, divisor_override=3), normal(2, 2, 4, 4), linear=(0,))
case(
    "avg_pool2d",
    "unequal padding",
    lambda x: ops.avg_pool2d(x, 2, 1, ((1, 0), (0, 1))),
    normal(2, 2, 4, 3),
    linear=(0,),
)
case("avg_pool3d", "padded", lambda x: ops.avg_pool3d(x, (2, 3, 2), 2, (1, 1, 0)), normal(1, 2, 4, 5, 4), linear=(0,))
case("adaptive_avg_pool2d", "uneven", lambda x: ops.adaptive_avg_pool2d(x, (3, 2)), normal(2, 2, 7, 5), linear=(0,))
case("adaptive_avg_pool2d", "global", lambda x: ops.adaptive_avg_pool2d(x, 1), normal(2, 2, 7, 5), linear=(0,))


# Normalisation and softmax.
def _batch_norm(training: bool) -> Callable[..., Any]:
    return lambda x, w, b, m, v: ops.batch_norm(x, m, v, w, b, training=training)


_STATISTICS = (normal(3), normal(3), normal(3), between(0.5, 2, 3))
case("batch_norm", "training", _batch_norm(True), normal(4, 3, 2, 2), *_STATISTICS)
case("batch_norm", "training, matrix", _batch_norm(True), normal(5, 3), *_STATISTICS)
case("batch_norm", "inference", _batch_norm(False), normal(4, 3, 2, 2), *_STATISTICS)
case("layer_norm", "two axes", lambda x, w, b: ops.layer_norm(x, (3, 4), w, b), normal(2, 3, 4), normal(3, 4),
     normal(3, 4))  # fmt: skip
case("group_norm", "groups", lambda x, w, b: ops.group_norm(x, 2, w, b), normal(2, 4, 3, 3), normal(4), normal(4))
case("softmax", "rows", ops.softmax, normal(3, 5))
case("softmax", "axis", lambda x: ops.softmax(x, 1), normal(2, 4, 3))
case("log_softmax", "rows", ops.log_softmax, normal(3, 5))

# Recurrent: batch, length, features and hidden units; with and without biases and initial states.
_GATES_AND_STATES = {"rnn": (1, 1), "lstm": (4, 2), "gru": (3, 1)}
_SEQUENCES: dict[str, tuple[int, int, int, int]] = {
    "odd": (3, 4, 2, 3), "reverse": (2, 3, 3, 2), "one step": (2, 1, 2, 2), "batch of one": (1, 3, 1, 1),
    "empty batch": (0, 2, 2, 3),
}  # fmt: skip
for _op, (_gates, _states) in _GATES_AND_STATES.items():
    for _name, (_batch, _steps, _features, _hidden) in _SEQUENCES.items():
        _rows = _gates * _hidden
        case(_op, _name, lambda *xs, op=_op, r=_name == "reverse": getattr(ops, op)(*xs, reverse=r),
             normal(_batch, _steps, _features), normal(_rows, _features), normal(_rows, _hidden), normal(_rows),
             normal(_rows), *[normal(_batch, _hidden)] * _states)  # fmt: skip
    case(_op, "no biases", lambda *xs, op=_op: getattr(ops, op)(*xs)[0], normal(2, 3, 2), normal(_gates * 3, 2),
         normal(_gates * 3, 3))  # fmt: skip
case("rnn", "relu", lambda x, w, u: ops.rnn(x, w, u, nonlinearity="relu"), between(0.2, 1, 2, 3, 2),
     between(0.2, 1, 3, 2), between(-0.1, 0.1, 3, 3))  # fmt: skip


# Attention.
STARTS = np.array([0, 0, 2, 2, 2], np.int32)
"""Two documents in a sequence of five."""


def _attention(queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[Sampler, ...]:
    return normal(*queries), normal(*keys), normal(*keys)


case("attention", "odd lengths", ops.attention, *_attention((2, 3, 5, 3), (2, 3, 7, 3)), linear=(2,))
case("attention", "causal, scale", lambda q, k, v: ops.attention(q, k, v, causal=True, scale=0.7),
     *_attention((1, 7, 4), (1, 7, 4)), linear=(2,))  # fmt: skip
case("attention", "one query", ops.attention, *_attention((1, 1, 5), (1, 9, 5)), linear=(2,))
case("attention", "one key, width 1", ops.attention, *_attention((3, 1), (1, 1)), linear=(2,))
case("attention", "broadcast", ops.attention, *_attention((2, 1, 3, 2), (3, 4, 2)), linear=(2,))
case("attention", "mask, a query without a key",
     lambda q, k, v, m: ops.attention(q, k, v, causal=True, mask=(m > 0) & (np.arange(5) > 0)),
     *_attention((2, 5, 3), (2, 5, 3)), integers(3, 2, 5), linear=(2,))  # fmt: skip
case("attention", "dropout", lambda q, k, v, s: ops.attention(q, k, v, dropout=0.4, rng=s, stream=3),
     *_attention((2, 3, 4), (2, 5, 4)), rng_state, linear=(2,))  # fmt: skip
case("attention", "dropout, mask", lambda q, k, v, m, s: ops.attention(q, k, v, mask=m > 0, dropout=0.4, rng=s),
     *_attention((2, 3, 4), (2, 5, 4)), integers(3, 2, 5), rng_state, linear=(2,))  # fmt: skip
case("attention", "documents, dropout",
     lambda q, k, v, s: ops.attention(q, k, v, causal=True, starts=STARTS, dropout=0.4, rng=s),
     *_attention((2, 5, 3), (2, 5, 3)), rng_state, linear=(2,))  # fmt: skip
case("attention", "documents, window, mask",
     lambda q, k, v, m: ops.attention(q, k, v, causal=True, starts=STARTS, window=2, mask=m > 0),
     *_attention((2, 5, 3), (2, 5, 3)), integers(3, 2, 5), linear=(2,))  # fmt: skip
case("attention", "empty batch", ops.attention, *_attention((0, 3, 2), (0, 4, 2)), linear=(2,))
case("attention", "no queries", ops.attention, *_attention((2, 0, 2), (2, 4, 2)), linear=(2,))
case("self_attention", "two heads", lambda x: ops.self_attention(x, 2), normal(2, 5, 18))
case("self_attention", "causal, dropout", lambda x, s: ops.self_attention(x, 1, True, 0.7, 0.4, s, 3), normal(1, 4, 6),
     rng_state)  # fmt: skip
case("self_attention", "documents", lambda x: ops.self_attention(x, 2, True, starts=STARTS), normal(2, 5, 12))
case("self_attention", "one row", lambda x: ops.self_attention(x, 3), normal(1, 9))
case("self_attention", "empty batch", lambda x: ops.self_attention(x, 2), normal(0, 3, 6))

# Empty batches.
for _name, _f, _input in (
    ("relu", ops.relu, normal(0, 3)),
    ("transpose", ops.transpose, normal(0, 3)),
    ("softmax", ops.softmax, normal(0, 3)),
    ("log_softmax", ops.log_softmax, normal(0, 3)),
    ("logsumexp", lambda x: ops.logsumexp(x, 1), normal(0, 3)),
    ("max", lambda x: ops.max(x, 1), normal(0, 3)),
    ("cumsum", lambda x: ops.cumsum(x, 1), normal(0, 3)),
    ("layer_norm", lambda x: ops.layer_norm(x, 3), normal(0, 3)),
    ("group_norm", lambda x: ops.group_norm(x, 2), normal(0, 4, 2)),
    ("max_pool2d", lambda x: ops.max_pool2d(x, 2), normal(0, 2, 4, 4)),
    ("avg_pool2d", lambda x: ops.avg_pool2d(x, 2), normal(0, 2, 4, 4)),
    ("take", lambda x: ops.take(x, np.zeros(0, np.int64)), normal(4, 3)),
):
    case(_name, "empty batch", _f, _input)

# Random numbers.
case("random_uniform", "odd", lambda s: ops.random_uniform(s, (3, 5), stream=2, dtype="float64"), rng_state, order=0)
case("random_uniform", "states of members",
     lambda s: tuple(vmap(lambda s, n=n: ops.random_uniform(s, n, dtype="float64"))(ops.stack([s, s + 1, s + 2]))
                     for n in ((), (8,), (5, 15))), rng_state, order=0)  # fmt: skip
case("random_normal", "odd", lambda s: ops.random_normal(s, (3, 5), stream=2, dtype="float64"), rng_state, order=0)
case("dropout", "half", lambda x, s: ops.dropout(x, 0.5, s, stream=1), normal(5, 7), rng_state, linear=(0,))
case("dropout", "empty batch", lambda x, s: ops.dropout(x, 0.5, s), normal(0, 3), rng_state)

# Losses.
case("cross_entropy", "plain", ops.cross_entropy, normal(4, 5), integers(5, 4))
case("cross_entropy", "smoothed", lambda x, t: ops.cross_entropy(x, t, 0.1), normal(4, 5), integers(5, 4))
case("cross_entropy", "class weights", lambda x, t, w: ops.cross_entropy(x, t, weight=w), normal(4, 5), integers(5, 4),
     between(0.5, 2, 5))  # fmt: skip
case("cross_entropy", "smoothed, weights, ignored, pixels",
     lambda x, t, w: ops.cross_entropy(x, t, 0.1, weight=w, ignore_index=1), normal(3, 4, 2, 3), integers(4, 3, 2, 3),
     between(0.5, 2, 4))  # fmt: skip
case("cross_entropy", "one row, not reduced", lambda x, t: ops.cross_entropy(x, t, reduction="none"), normal(5),
     integers(5))  # fmt: skip
case("cross_entropy", "probabilities, weights", lambda x, p, w: ops.cross_entropy(x, p, 0.1, weight=w),
     normal(3, 4, 2), between(0, 1, 3, 4, 2), between(0.5, 2, 4))  # fmt: skip
case("nll_loss", "plain", ops.nll_loss, normal(4, 5), integers(5, 4), linear=(0,))
case("nll_loss", "ignored, not reduced", lambda x, t: ops.nll_loss(x, t, ignore_index=2, reduction="none"),
     normal(4, 5, 2), integers(5, 4, 2), linear=(0,))  # fmt: skip
case("nll_loss", "weights, sum", lambda x, t, w: ops.nll_loss(x, t, weight=w, reduction="sum"), normal(4, 5),
     integers(5, 4), between(0.5, 2, 5), linear=(0, 2))  # fmt: skip
case("mse_loss", "plain", ops.mse_loss, normal(4, 5), normal(4, 5))
case("mse_loss", "sum", lambda x, y: ops.mse_loss(x, y, reduction="sum"), normal(4, 5), normal(4, 5))
case("l1_loss", "apart", lambda x: ops.l1_loss(x, ops.zeros_like(x)), apart(4, 5))
case("huber_loss", "both sides", lambda x: ops.huber_loss(x, ops.zeros_like(x), 0.8), apart(4, 5, kinks=(-0.8, 0, 0.8)))
case(
    "binary_cross_entropy_with_logits", "plain", ops.binary_cross_entropy_with_logits, normal(4, 5), between(0, 1, 4, 5)
)
case("binary_cross_entropy_with_logits", "weights",
     lambda x, t, w, p: ops.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=p), normal(4, 5),
     between(0, 1, 4, 5), between(0.5, 2, 4, 1), between(0.5, 2, 5), linear=(2,))  # fmt: skip


def _sin_times_y_forward(x: Value, y: Value) -> tuple[Value, Any]:
    cos = ops.cos(x)
    return ops.sin(x) * y, (cos, y, ops.sin(x))


def _sin_times_y_backward(residuals: Any, ct: Value) -> tuple[Value, Value]:
    cos, y, sin = residuals
    return ct * cos * y, ct * sin


case("custom_vjp", "two arguments", custom_vjp(_sin_times_y_forward, _sin_times_y_backward), normal(3, 4), normal(3, 4),
     order=4)  # fmt: skip
case("create", "full", lambda: ops.full((2, 3), 1.5, "float64"), order=0)
