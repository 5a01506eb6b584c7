"""Gradients of a convolution behind max pooling: the same numbers as the plain ones with far fewer products.

After convolution, (ReLU,) max pooling, the gradient of the convolution's output is what `max_pool2d_put` makes: zero
but for at most one element a window. These primitives take the pooled gradient and the positions instead. They occur
only in optimised Programs, where a pass puts them in the place of the two plain ones, so they have no derivatives.

Elements of the gradient that are zero are skipped. Where an infinity or NaN of the image or the weights would meet
them, the plain ones give NaN and these do not.
"""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.primitive import Primitive
from adtrain.core.registry import register
from adtrain.core.types import ArrayType
from adtrain.lowering.cpu.conv import (
    pooled_input_grad_prepared,
    pooled_input_grad_scratch,
    pooled_numbers,
    pooled_weight_grad_scratch,
)
from adtrain.ops.conv import input_grad_p, weight_grad_p
from adtrain.ops.pool import max_pool2d_put_p

Pair = tuple[int, int]

SHORTEST_RUN = 16
"""Bytes."""


def _put_type(g: Any, where: Any, windows: Any, shape: tuple[int, ...]) -> ArrayType:
    """Of the gradient that the pooled one stands for."""
    (put,) = max_pool2d_put_p.output_types((g, where), {"windows": windows, "shape": shape})
    return put


def _put(g: Any, where: Any, windows: Any, shape: tuple[int, ...]) -> Any:
    return max_pool2d_put_p.reference(g, where, windows, shape)


def _input_grad_shape(
    g: Any, where: Any, w: Any, window: Any, windows: Any, shape: tuple[int, ...], size: Pair, precision: str
) -> Any:
    return input_grad_p.shape(_put_type(g, where, windows, shape), w, window, size, precision)


def _weight_grad_shape(
    x: Any, g: Any, where: Any, window: Any, windows: Any, shape: tuple[int, ...], size: Pair, precision: str
) -> Any:
    return weight_grad_p.shape(x, _put_type(g, where, windows, shape), window, size, precision)


def _input_grad_reference(
    g: Any, where: Any, w: Any, window: Any, windows: Any, shape: tuple[int, ...], size: Pair, precision: str
) -> Any:
    return input_grad_p.reference(_put(g, where, windows, shape), w, window, size, precision)


def _weight_grad_reference(
    x: Any, g: Any, where: Any, window: Any, windows: Any, shape: tuple[int, ...], size: Pair, precision: str
) -> Any:
    return weight_grad_p.reference(x, _put(g, where, windows, shape), window, size, precision)


def _handled(window: Any, windows: Any, g: Any, shape: tuple[int, ...], run: int) -> bool:
    """Whether the C functions are for this convolution and pooling, and faster than the plain ones.

    They take about twice the time for a product and fill vectors badly with kernel rows of few numbers (``run``).
    """
    if window.stride != (1, 1) or window.dilation != (1, 1) or window.groups != 1 or windows.padding != (0, 0):
        return False
    return run * g.dtype.itemsize >= SHORTEST_RUN and shape[2] * shape[3] >= 2 * g.shape[2] * g.shape[3]


conv2d_input_grad_pooled_p = Primitive(
    "conv2d_input_grad_pooled",
    _input_grad_shape,
    _input_grad_reference,
    flops=lambda g, where, w, **_: 2 * g.size * w.shape[1] * w.shape[2] * w.shape[3],
)
register(
    "conv2d_input_grad_pooled",
    "cpu",
    CKernel(
        "conv_pooled.c",
        "conv2d_input_grad_pooled",
        lambda g, where, w, window, windows, shape, size, precision: pooled_numbers(
            (1, w.shape[1], *size), w.shape, shape, g.shape, window, windows, g.dtype.itemsize, precision
        ),
        items=lambda g, where, w, window, windows, shape, size, precision: (
            (True, True, False) if _handled(window, windows, g, shape, w.shape[1] * w.shape[3]) else None
        ),
        scratch=pooled_input_grad_scratch,
        prepared=pooled_input_grad_prepared,
    ),
)
"""(g, where, w; window, windows, shape, size, precision):
conv2d_input_grad(max_pool2d_put(g, where, windows, shape), w, ...)."""

conv2d_weight_grad_pooled_p = Primitive(
    "conv2d_weight_grad_pooled",
    _weight_grad_shape,
    _weight_grad_reference,
    flops=lambda x, g, where, window, windows, shape, size, precision: 2 * g.size * x.shape[1] * size[0] * size[1],
)
register(
    "conv2d_weight_grad_pooled",
    "cpu",
    CKernel(
        "conv_pooled.c",
        "conv2d_weight_grad_pooled",
        lambda x, g, where, window, windows, shape, size, precision: pooled_numbers(
            x.shape, (shape[1], x.shape[1], *size), shape, g.shape, window, windows, g.dtype.itemsize, precision
        ),
        items=lambda x, g, where, window, windows, shape, size, precision: (
            (True, True, True) if _handled(window, windows, g, shape, x.shape[1] * size[1]) else None
        ),
        sums=True,
        scratch=pooled_weight_grad_scratch,
    ),
)
"""(x, g, where; window, windows, shape, size, precision):
conv2d_weight_grad(x, max_pool2d_put(g, where, windows, shape), ...)."""
