"""Gradients of a convolution behind max pooling: the same values as the dense ones, with far fewer products.

After convolution, (ReLU,) max pooling, the gradient of the convolution's output is what `max_pool2d_put` makes: zero
except at most one element per window. These primitives take the pooled gradient and the positions instead. They occur
only in optimised Programs, where a pass substitutes them for the dense ones, so they have no derivatives.

Elements of the gradient that are zero are skipped. Where an infinity or NaN of the image or the weights would meet
them, the dense ones give NaN and these do not.
"""

from __future__ import annotations

from typing import Any

from adtrain.core.primitive import Primitive, Trait
from adtrain.core.rewrites import POOLED_GRADIENT
from adtrain.core.types import ArrayType
from adtrain.ops.conv import input_grad_p, weight_grad_p
from adtrain.ops.pool import max_pool2d_put_p

Pair = tuple[int, int]


def _put_type(g: Any, where: Any, windows: Any, shape: tuple[int, ...]) -> ArrayType:
    """The type of the gradient before pooling."""
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


conv2d_input_grad_pooled_p = Primitive(
    "conv2d_input_grad_pooled",
    _input_grad_shape,
    _input_grad_reference,
    flops=lambda g, where, w, **_: 2 * g.size * w.shape[1] * w.shape[2] * w.shape[3],
    traits=(Trait.CONVOLUTION,),
)
"""(g, where, w; window, windows, shape, size, precision):
conv2d_input_grad(max_pool2d_put(g, where, windows, shape), w, ...)."""

conv2d_weight_grad_pooled_p = Primitive(
    "conv2d_weight_grad_pooled",
    _weight_grad_shape,
    _weight_grad_reference,
    flops=lambda x, g, where, window, windows, shape, size, precision: 2 * g.size * x.shape[1] * size[0] * size[1],
)
"""(x, g, where; window, windows, shape, size, precision):
conv2d_weight_grad(x, max_pool2d_put(g, where, windows, shape), ...)."""

POOLED_GRADIENT[input_grad_p] = (0, conv2d_input_grad_pooled_p)
POOLED_GRADIENT[weight_grad_p] = (1, conv2d_weight_grad_pooled_p)
