"""All operations. One file per family: public function, shape rule, NumPy reference, vjp rules, cost. No kernels."""

import sys

import adtrain.ops.bfloat16  # primitives that passes look up
import adtrain.ops.conv_bfloat16
import adtrain.ops.pool_channels_last  # noqa: F401
from adtrain.core.array import bind_operators
from adtrain.core.precision import matmul_precision
from adtrain.ops import elementwise
from adtrain.ops.activation import elu, gelu, leaky_relu, relu, sigmoid, silu, soft_cap, softplus, squared_relu
from adtrain.ops.attention import attention
from adtrain.ops.bitwise import bitwise_and, bitwise_not, bitwise_or, bitwise_xor
from adtrain.ops.broadcasting import broadcast_to, reshape, sum_to
from adtrain.ops.collectives import all_gather, all_reduce, all_to_all, gather_shards
from adtrain.ops.compare import (
    clip,
    equal,
    greater,
    greater_equal,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    maximum,
    minimum,
    not_equal,
    where,
)
from adtrain.ops.conv import conv2d, conv_transpose2d
from adtrain.ops.conv_axes import conv1d, conv3d, conv_transpose1d, conv_transpose3d
from adtrain.ops.create import arange, full, ones, ones_like, zeros, zeros_like
from adtrain.ops.cross_entropy import cross_entropy, nll_loss
from adtrain.ops.diagonals import diag, diagonal, trace, tril, triu
from adtrain.ops.division import ceil, floor, floor_divide, remainder, round, trunc
from adtrain.ops.einsum import einsum
from adtrain.ops.elementwise import *  # noqa: F403
from adtrain.ops.getitem import getitem
from adtrain.ops.hash_grid import hash_grid
from adtrain.ops.index import embedding, one_hot, put_rows, take, take_along_axis
from adtrain.ops.linalg import norm
from adtrain.ops.loss import binary_cross_entropy_with_logits, huber_loss, l1_loss, mse_loss
from adtrain.ops.matmul import matmul
from adtrain.ops.normal import random_normal
from adtrain.ops.normalisation import batch_norm, group_norm, layer_norm
from adtrain.ops.pool import adaptive_avg_pool2d
from adtrain.ops.pool_functions import avg_pool1d, avg_pool2d, avg_pool3d, max_pool1d, max_pool2d, max_pool3d
from adtrain.ops.power import power
from adtrain.ops.random import dropout, random_uniform, rng_state
from adtrain.ops.rearrange import repeat, roll, split, tile
from adtrain.ops.recurrent import gru, lstm, rnn
from adtrain.ops.reduce import all, any, argmax, argmin, cumsum, logsumexp, max, mean, min, prod, std, sum, var
from adtrain.ops.self_attention import self_attention
from adtrain.ops.shape import concatenate, expand_dims, flip, pad, slice, squeeze, stack, transpose
from adtrain.ops.softmax import log_softmax, softmax
from adtrain.ops.sort import argsort, sort, topk
from adtrain.ops.tensor_products import cross, kron, tensordot

bind_operators(sys.modules[__name__])

__all__ = [
    "adaptive_avg_pool2d",
    "all",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "attention",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "broadcast_to",
    "ceil",
    "clip",
    "concatenate",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross",
    "cross_entropy",
    "cumsum",
    "diag",
    "diagonal",
    "dropout",
    "einsum",
    "elu",
    "embedding",
    "equal",
    "expand_dims",
    "flip",
    "floor",
    "floor_divide",
    "full",
    "gather_shards",
    "gelu",
    "getitem",
    "greater",
    "greater_equal",
    "group_norm",
    "gru",
    "hash_grid",
    "huber_loss",
    "isfinite",
    "isinf",
    "isnan",
    "kron",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "less",
    "less_equal",
    "log_softmax",
    "logsumexp",
    "lstm",
    "matmul",
    "matmul_precision",
    "max",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mse_loss",
    "nll_loss",
    "norm",
    "not_equal",
    "one_hot",
    "ones",
    "ones_like",
    "pad",
    "power",
    "prod",
    "put_rows",
    "random_normal",
    "random_uniform",
    "relu",
    "remainder",
    "repeat",
    "reshape",
    "rng_state",
    "rnn",
    "roll",
    "round",
    "self_attention",
    "sigmoid",
    "silu",
    "slice",
    "soft_cap",
    "softmax",
    "softplus",
    "sort",
    "split",
    "squared_relu",
    "squeeze",
    "stack",
    "std",
    "sum",
    "sum_to",
    "take",
    "take_along_axis",
    "tensordot",
    "tile",
    "topk",
    "trace",
    "transpose",
    "tril",
    "triu",
    "trunc",
    "var",
    "where",
    "zeros",
    "zeros_like",
]
__all__ += elementwise.__all__
