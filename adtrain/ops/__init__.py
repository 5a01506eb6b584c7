"""All operations. One file per family: public function, shape rule, NumPy reference, vjp rules, cost. No kernels."""

import sys

import adtrain.ops.bias_sums
import adtrain.ops.conv_pooled  # noqa: F401  primitives that passes look up
from adtrain.core.array import bind_operators
from adtrain.core.precision import matmul_precision
from adtrain.ops.activation import elu, gelu, leaky_relu, relu, sigmoid, silu, softplus
from adtrain.ops.broadcasting import broadcast_to, reshape, sum_to
from adtrain.ops.compare import (
    clip,
    equal,
    greater,
    greater_equal,
    less,
    less_equal,
    maximum,
    minimum,
    not_equal,
    where,
)
from adtrain.ops.conv import conv2d, conv_transpose2d
from adtrain.ops.create import arange, full, ones, ones_like, zeros, zeros_like
from adtrain.ops.elementwise import (
    abs,
    add,
    astype,
    cos,
    div,
    erf,
    exp,
    expm1,
    log,
    log1p,
    mul,
    neg,
    reciprocal,
    rsqrt,
    sign,
    sin,
    sqrt,
    square,
    stop_gradient,
    sub,
    tanh,
)
from adtrain.ops.getitem import getitem
from adtrain.ops.index import embedding, one_hot, take, take_along_axis
from adtrain.ops.loss import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    l1_loss,
    mse_loss,
    nll_loss,
)
from adtrain.ops.matmul import matmul
from adtrain.ops.norm import batch_norm, group_norm, layer_norm
from adtrain.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from adtrain.ops.power import power
from adtrain.ops.random import dropout, random_uniform, rng_state
from adtrain.ops.reduce import argmax, cumsum, logsumexp, max, mean, min, sum, var
from adtrain.ops.shape import concatenate, expand_dims, flip, pad, slice, squeeze, stack, transpose
from adtrain.ops.softmax import log_softmax, softmax

bind_operators(sys.modules[__name__])

__all__ = [
    "abs",
    "adaptive_avg_pool2d",
    "add",
    "arange",
    "argmax",
    "astype",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "broadcast_to",
    "clip",
    "concatenate",
    "conv2d",
    "conv_transpose2d",
    "cos",
    "cross_entropy",
    "cumsum",
    "div",
    "dropout",
    "elu",
    "embedding",
    "equal",
    "erf",
    "exp",
    "expand_dims",
    "expm1",
    "flip",
    "full",
    "gelu",
    "getitem",
    "greater",
    "greater_equal",
    "group_norm",
    "huber_loss",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "matmul",
    "matmul_precision",
    "max",
    "max_pool2d",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mse_loss",
    "mul",
    "neg",
    "nll_loss",
    "not_equal",
    "one_hot",
    "ones",
    "ones_like",
    "pad",
    "power",
    "random_uniform",
    "reciprocal",
    "relu",
    "reshape",
    "rng_state",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "slice",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "stop_gradient",
    "sub",
    "sum",
    "sum_to",
    "take",
    "take_along_axis",
    "tanh",
    "transpose",
    "var",
    "where",
    "zeros",
    "zeros_like",
]
