"""Multi-head attention and transformer layers, on sequences of tokens (tokens, width)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError, ShapeError
from adtrain.nn import fields
from adtrain.nn.activation import Dropout
from adtrain.nn.containers import Container, child_output_shape, run_child
from adtrain.nn.init import xavier_uniform
from adtrain.nn.linear import Linear
from adtrain.nn.module import Mode, Module, Params, Shape, State
from adtrain.nn.norm import LayerNorm
from adtrain.nn.tokens import TOKEN_AXES
from adtrain.ops.attention import MAX_WIDTH
from adtrain.option_types import Fraction, NonNegative, Size


@dataclass(frozen=True)
class MultiheadAttention(Module):
    """Self-attention of several heads (Vaswani et al. 2017): (tokens, embed_dim) -> (tokens, embed_dim).

    A head has embed_dim / num_heads numbers of each query, key and value. `dropout` drops probabilities in training.
    With `causal` token i attends to tokens 0 to i. The parameters are those of torch.nn.MultiheadAttention:
    "in_proj_weight" (3 embed_dim, embed_dim), "in_proj_bias", "out_proj.weight" and "out_proj.bias".
    """

    left_out = ("embed_dim", int, "embed_dim is inferred from the input")
    num_heads: Size
    _: KW_ONLY
    dropout: Fraction = 0.0
    bias: bool = True
    causal: bool = False
    embed_dim: Size | None = None

    def output_shape(self, shape: Shape) -> Shape:
        fields.check_ndim(self, shape, TOKEN_AXES)
        tokens, width = shape
        fields.check_inferred(self, "embed_dim", width, shape)
        if width % self.num_heads:
            raise ShapeError(
                f"multihead_attention: num_heads {self.num_heads} does not divide the input's width {width}: {shape}"
            )
        if not 1 <= width // self.num_heads <= MAX_WIDTH:
            raise ShapeError(
                f"multihead_attention: num_heads {self.num_heads} gives heads of {width // self.num_heads} numbers, "
                f"expected 1 to {MAX_WIDTH}: {shape}"
            )
        if tokens == 0:
            raise ShapeError(f"multihead_attention: expected at least one token, found {shape}")
        return shape

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        width = shape[-1]
        weights: dict[str, Shape] = {"in_proj_weight": (3 * width, width), "out_proj.weight": (width, width)}
        biases: dict[str, Shape] = {"in_proj_bias": (3 * width,), "out_proj.bias": (width,)}
        return weights | biases if self.bias else weights

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        params: Params = {"out_proj": {}}
        for name, size in self.parameter_shapes(shape).items():
            drawn = xavier_uniform(size, rng) if name.endswith("weight") else np.zeros(size)
            inside = params["out_proj"] if name.startswith("out_proj") else params
            inside[name.removeprefix("out_proj.")] = array(drawn.astype(dtype))
        return params, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        drops = self.dropout > 0 and mode.is_training(self)
        if drops and mode.rng is None:
            raise AdtrainError("multihead_attention: found no rng in training, expected Mode(training=True, rng=...)")
        joined = ops.self_attention(
            self._linear(x, params, "in_proj_"),
            self.num_heads,
            causal=self.causal,
            dropout=self.dropout if drops else 0.0,
            rng=mode.rng,
            stream=mode.stream,
        )
        return self._linear(joined, params["out_proj"], ""), state

    def _linear(self, x: Value, params: Params, prefix: str) -> Value:
        y = ops.matmul(x, params[f"{prefix}weight"], transpose_b=True)
        return ops.add(y, params[f"{prefix}bias"]) if self.bias else y


@dataclass(frozen=True)
class TransformerEncoderLayer(Container):
    """Self-attention, then two linear layers, each with dropout, a residual sum and layer normalisation.

    The names of options and parameters are those of torch.nn.TransformerEncoderLayer. The sums are normalised (Vaswani
    et al. 2017), or with `norm_first` the inputs of attention and of the linear layers (R. Xiong et al., "On layer
    normalization in the transformer architecture", 2020).
    """

    CHILDREN: ClassVar = ("norm1", "self_attn", "norm2", "linear1", "linear2")
    """In the order in which they run with `norm_first`."""
    left_out = ("d_model", int, "d_model is inferred from the input")
    nhead: Size
    _: KW_ONLY
    dim_feedforward: Size = 2048
    dropout: Fraction = 0.1
    activation: Literal["relu", "gelu"] = "relu"
    layer_norm_eps: NonNegative = 1e-5
    norm_first: bool = False
    causal: bool = False
    d_model: Size | None = None

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        layers = self._layers(shape)
        for name in self.CHILDREN if self.norm_first else ("self_attn", "norm1", "linear1", "linear2", "norm2"):
            yield name, layers[name], (*shape[:-1], self.dim_feedforward) if name == "linear2" else shape

    def _layers(self, shape: Shape) -> dict[str, Module]:
        norm = LayerNorm(eps=self.layer_norm_eps)
        attention = MultiheadAttention(self.nhead, dropout=self.dropout, causal=self.causal)
        linear1, linear2 = (Linear(n, weight_init="xavier_uniform") for n in (self.dim_feedforward, shape[-1]))
        return dict(zip(self.CHILDREN, (norm, attention, norm, linear1, linear2), strict=True))

    def output_shape(self, shape: Shape) -> Shape:
        fields.check_ndim(self, shape, TOKEN_AXES)
        fields.check_inferred(self, "d_model", shape[-1], shape)
        if shape[-1] % self.nhead:
            raise ShapeError(
                f"transformer_encoder_layer: nhead {self.nhead} does not divide the input's width {shape[-1]}: {shape}"
            )
        for name, child, inner in self.children(shape):
            child_output_shape(name, child, inner)
        return shape

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        layers = self._layers(x.shape[1:])
        drop = Dropout(self.dropout)

        def run(name: str, x: Value) -> Value:
            return run_child(name, f"{name}.{layers[name].kind()}", layers[name], params, {}, x, mode)[0]

        def dropped(name: str, x: Value) -> Value:
            return drop.forward({}, {}, x, mode.at(name))[0]

        def attend(x: Value) -> Value:
            return dropped("dropout1", run("self_attn", x))

        def feed_forward(x: Value) -> Value:
            hidden = getattr(ops, self.activation)(run("linear1", x))
            return dropped("dropout2", run("linear2", dropped("dropout", hidden)))

        if self.norm_first:
            x = ops.add(x, attend(run("norm1", x)))
            return ops.add(x, feed_forward(run("norm2", x))), state
        x = run("norm1", ops.add(x, attend(x)))
        return run("norm2", ops.add(x, feed_forward(x))), state
