"""Weight gradients of a convolution together with its bias gradient, which sums the same output gradient.

A pass substitutes each for two equations in optimised Programs, so they have no derivatives.
"""

from __future__ import annotations

from typing import Any

from adtrain.core.primitive import Primitive
from adtrain.core.rewrites import WITH_BIAS_GRADIENT
from adtrain.core.types import ArrayType
from adtrain.ops.broadcasting import sum_p
from adtrain.ops.conv import of_groups, weight_grad_p
from adtrain.ops.conv_pooled import conv2d_weight_grad_pooled_p
from adtrain.ops.rounding import rounded

OF_BIAS = (0, 2, 3)
"""The axes along which a bias is broadcast."""


def _summed(x: Any) -> Any:
    return sum_p.reference(x, axes=OF_BIAS)


def _weight_types(x: Any, g: Any, **params: Any) -> tuple[ArrayType, ArrayType]:
    (w,) = weight_grad_p.output_types((x, g), params)
    return w, ArrayType(g.shape[1:2], g.dtype)


conv2d_weight_grad_sum_p = Primitive(
    "conv2d_weight_grad_sum",
    _weight_types,
    lambda x, g, **params: (weight_grad_p.reference(x, g, **params), _summed(g)),
    flops=lambda x, g, **params: weight_grad_p.cost([x, g], params).flops + g.size,
    axes=lambda *_, window, **params: of_groups(window, "nc..,no..->oc..,o", "n...,n...->....,."),
)
"""(x, g; window, size, precision): conv2d_weight_grad(x, g, ...), and the sum of g for each channel."""


def _pooled_types(x: Any, g: Any, where: Any, **params: Any) -> tuple[ArrayType, ArrayType]:
    (w,) = conv2d_weight_grad_pooled_p.output_types((x, g, where), params)
    return w, ArrayType(g.shape[1:2], g.dtype)


conv2d_weight_grad_pooled_sum_p = Primitive(
    "conv2d_weight_grad_pooled_sum",
    _pooled_types,
    lambda x, g, where, **params: (
        conv2d_weight_grad_pooled_p.reference(x, g, where, **params),
        _summed(rounded(g, params["precision"])),
    ),
    flops=lambda x, g, where, **params: conv2d_weight_grad_pooled_p.cost([x, g, where], params).flops + g.size,
    axes=lambda *_, window, **params: of_groups(window, "nc..,no..,no..->oc..,o", "n...,n...,n...->....,."),
)
"""(x, g, where; window, windows, shape, size, precision): conv2d_weight_grad_pooled(x, g, where, ...), and the sum of g
for each channel, rounded as for the weight gradient."""

WITH_BIAS_GRADIENT[weight_grad_p] = (1, conv2d_weight_grad_sum_p)
WITH_BIAS_GRADIENT[conv2d_weight_grad_pooled_p] = (1, conv2d_weight_grad_pooled_sum_p)
