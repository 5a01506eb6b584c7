"""Gradients of a convolution that max pooling follows: the same values as the dense gradients, with fewer products.

The gradient of the convolution's output is then the result of `max_pool2d_put`: at most one element per window is not
zero. These primitives take the pooled gradient and the positions instead. A pass substitutes them for the dense
gradients in optimised Programs, so they have no derivatives.

They skip zeros of the gradient. The dense gradients multiply these zeros, so an infinity or NaN in the image or the
weights gives NaN there, but not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adtrain.core.primitive import Primitive, Trait
from adtrain.core.rewrites import POOLED_GRADIENT
from adtrain.core.types import ArrayType
from adtrain.ops.conv import input_grad_p, of_groups, weight_grad_p
from adtrain.ops.pool import max_pool2d_put_p


def _put_type(g: Any, where: Any, windows: Any, shape: tuple[int, ...]) -> ArrayType:
    """The type of the gradient before pooling."""
    (put,) = max_pool2d_put_p.output_types((g, where), {"windows": windows, "shape": shape})
    return put


def _input_grad(dense: Callable[..., Any], put: Callable[..., Any]) -> Callable[..., Any]:
    """The shape rule or reference ``dense`` of the input gradient, applied to the gradient before pooling."""
    return lambda g, where, w, window, windows, shape, size, precision: dense(
        put(g, where, windows, shape), w, window, size, precision
    )


def _weight_grad(dense: Callable[..., Any], put: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the weight gradient."""
    return lambda x, g, where, window, windows, shape, size, precision: dense(
        x, put(g, where, windows, shape), window, size, precision
    )


conv2d_input_grad_pooled_p = Primitive(
    "conv2d_input_grad_pooled",
    _input_grad(input_grad_p.shape, _put_type),
    _input_grad(input_grad_p.reference, max_pool2d_put_p.reference),
    flops=lambda g, where, w, **_: 2 * g.size * w.shape[1] * w.shape[2] * w.shape[3],
    traits=(Trait.CONVOLUTION,),
    axes=lambda *_, window, **params: of_groups(window, "no..,no..,oc..->nc..", "n...,n...,....->n..."),
)
"""(g, where, w; window, windows, shape, size, precision):
conv2d_input_grad(max_pool2d_put(g, where, windows, shape), w, ...)."""

conv2d_weight_grad_pooled_p = Primitive(
    "conv2d_weight_grad_pooled",
    _weight_grad(weight_grad_p.shape, _put_type),
    _weight_grad(weight_grad_p.reference, max_pool2d_put_p.reference),
    flops=lambda x, g, where, window, windows, shape, size, precision: 2 * g.size * x.shape[1] * size[0] * size[1],
    axes=lambda *_, window, **params: of_groups(window, "nc..,no..,no..->oc..", "n...,n...,n...->...."),
)
"""(x, g, where; window, windows, shape, size, precision):
conv2d_weight_grad(x, max_pool2d_put(g, where, windows, shape), ...)."""

POOLED_GRADIENT[input_grad_p] = (0, conv2d_input_grad_pooled_p)
POOLED_GRADIENT[weight_grad_p] = (1, conv2d_weight_grad_pooled_p)
