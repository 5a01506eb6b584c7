"""Layers are immutable descriptions. Their arrays are in separate trees (nested dicts).

Typical use:

    model = nn.Sequential(nn.Linear(32), nn.ReLU(), nn.Linear(10))
    params, state = model.init((784,))
    logits = model(params, x)

A model with dropout or batch normalisation differs in training and evaluation:

    logits, state = model.forward(params, state, x, nn.Mode(training=True, rng=ops.rng_state(seed, step)))
"""

from __future__ import annotations

from collections.abc import Callable

from adtrain import ops
from adtrain.core.array import Value
from adtrain.nn.activation import (
    ELU,
    GELU,
    Dropout,
    Dropout2d,
    Flatten,
    Hardswish,
    LeakyReLU,
    LogSoftmax,
    PReLU,
    ReLU,
    Reshape,
    Scale,
    Select,
    Sigmoid,
    SiLU,
    SoftCap,
    Softmax,
    Softplus,
    SquaredReLU,
    Tanh,
)
from adtrain.nn.attention import (
    ACTIVATIONS,
    QK_NORM_EPS,
    DecoderLayer,
    MultiheadAttention,
    TransformerEncoderLayer,
    TransformerLayer,
)
from adtrain.nn.containers import Add, Branches, Concat, Container, Multiply, Residual, Sequential, WithCoefficients
from adtrain.nn.conv import (
    AdaptiveAvgPool2d,
    AdaptiveMaxPool2d,
    AvgPool2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    MaxPool2d,
    Upsample,
)
from adtrain.nn.init import ConvInit, WeightInit
from adtrain.nn.linear import Embedding, FourierFeatures, HashGrid, Linear, Sine
from adtrain.nn.module import LayerError, Mode, Module, Params, Shape, State, Token, with_weights
from adtrain.nn.network import (
    LayerRow,
    LowRankSequential,
    count_parameters,
    describe,
    is_low_rank,
    layer_of,
    layers,
    with_products,
)
from adtrain.nn.norm import BatchNorm1d, BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm, RMSNorm
from adtrain.nn.recurrent import GRU, LSTM, RNN
from adtrain.nn.tokens import ClassToken, Mean, Patches, PositionalEmbedding

LAYERS: dict[str, type[Module]] = {
    layer.kind(): layer
    for layer in (
        Linear, Conv2d, ConvTranspose2d, Conv1d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, AdaptiveMaxPool2d, Upsample,
        BatchNorm1d, BatchNorm2d, LayerNorm, RMSNorm, GroupNorm, InstanceNorm2d, Embedding, RNN, LSTM, GRU,
        Dropout, Dropout2d, Scale, Flatten, Reshape, Select,
        MultiheadAttention, TransformerEncoderLayer, DecoderLayer, PositionalEmbedding, ClassToken, Patches, Mean,
        HashGrid, FourierFeatures, Sine,
        ReLU, SquaredReLU, LeakyReLU, PReLU, ELU, GELU, SiLU, Hardswish, Tanh, Sigmoid, Softplus, SoftCap, Softmax,
        LogSoftmax,
    )
}  # fmt: skip
"""Layers by their name in a config, without the containers."""

LOSSES: dict[str, Callable[..., Value]] = {
    "cross_entropy": ops.cross_entropy,
    "nll": ops.nll_loss,
    "mse": ops.mse_loss,
    "l1": ops.l1_loss,
    "huber": ops.huber_loss,
    "binary_cross_entropy_with_logits": ops.binary_cross_entropy_with_logits,
}
"""Losses by their name in a config: f(outputs, targets, **options) is the mean over the batch."""
