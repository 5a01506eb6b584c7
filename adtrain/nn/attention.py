"""Multi-head attention and transformer layers, on sequences of tokens (tokens, width)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields
from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.custom import custom_vjp
from adtrain.core.errors import AdtrainError, ShapeError
from adtrain.nn.activation import GELU, Dropout, ReLU, SiLU, SquaredReLU
from adtrain.nn.containers import Container, child_output_shape, run_child
from adtrain.nn.init import WeightInit, drawn
from adtrain.nn.linear import Linear, product
from adtrain.nn.module import TOKEN_AXES, Mode, Module, Params, Shape, State, Token, check_inferred, check_ndim
from adtrain.nn.norm import LayerNorm, RMSNorm
from adtrain.ops.attention import MAX_WIDTH
from adtrain.option_types import Fraction, NonNegative, Positive, Size

QK_NORM_EPS = 1e-6
"""Added to the mean square of a query or key, as in the models that have `qk_norm`."""

CACHE = "keys", "values"
"""The names of what attention keeps of earlier tokens, see `Module.new_cache`."""


@dataclass(frozen=True)
class MultiheadAttention(Module):
    """Self-attention of several heads (Vaswani et al. 2017): (tokens, embed_dim) -> (tokens, embed_dim).

    A head has embed_dim / num_heads numbers of each query, key and value. `dropout` drops probabilities in training.
    With `causal` token i attends to tokens 0 to i, with `window` to those whose distance is less than `window`.
    `rotary_base` rotates queries and keys by their positions (J. Su et al., "RoFormer", 2021): the numbers i and
    i + n/2 of a head of n by the angle position * rotary_base^(-2i/n). With `num_key_value_heads` several query heads
    share a head of keys and values (J. Ainslie et al., "GQA", 2023). `qk_norm` divides each query and key by its root
    mean square, times a weight. `soft_cap` c makes c tanh(s / c) of a score s.

    The parameters are those of torch.nn.MultiheadAttention: "in_proj_weight" (3 embed_dim, embed_dim), "in_proj_bias",
    "out_proj.weight" and "out_proj.bias"; with fewer heads of keys and values "in_proj_weight" has fewer rows. With
    `qk_norm` also "q_norm.weight" and "k_norm.weight". Initial weights are multiplied by `init_gain`, and those of
    "out_proj" also by `out_init_gain`.
    """

    left_out = ("embed_dim", int, "embed_dim is inferred from the input")
    num_heads: Size
    _: KW_ONLY
    dropout: Fraction = 0.0
    bias: bool = True
    causal: bool = False
    embed_dim: Size | None = None
    num_key_value_heads: Size | None = None
    window: Size | None = None
    rotary_base: Positive | None = None
    qk_norm: bool = False
    soft_cap: Positive | None = None
    weight_init: WeightInit = "xavier_uniform"
    init_gain: NonNegative = 1.0
    out_init_gain: NonNegative = 1.0

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def is_plain(self) -> bool:
        """Whether all scores are products of queries and keys as they are projected, within any distance."""
        return not self._by_position and self.window is None and self.soft_cap is None

    @property
    def _by_position(self) -> bool:
        """Whether queries and keys are normalised, rotated or repeated."""
        return self.qk_norm or self.rotary_base is not None or self.key_value_heads < self.num_heads

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, TOKEN_AXES)
        tokens, width = shape
        check_inferred(self, "embed_dim", width, shape)
        if width % self.num_heads:
            raise ShapeError(
                f"multihead_attention: num_heads {self.num_heads} does not divide the input's width {width}: {shape}"
            )
        if not 1 <= width // self.num_heads <= MAX_WIDTH:
            raise ShapeError(
                f"multihead_attention: num_heads {self.num_heads} gives heads of {width // self.num_heads} numbers, "
                f"expected 1 to {MAX_WIDTH}: {shape}"
            )
        if self.num_heads % self.key_value_heads:
            raise ShapeError(
                f"multihead_attention: num_key_value_heads {self.num_key_value_heads} does not divide num_heads "
                f"{self.num_heads}"
            )
        if self.rotary_base is not None and width // self.num_heads % 2:
            raise ShapeError(
                f"multihead_attention: num_heads {self.num_heads} gives heads of {width // self.num_heads} numbers, "
                f"expected an even number with rotary_base: {shape}"
            )
        if tokens == 0:
            raise ShapeError(f"multihead_attention: expected at least one token, found {shape}")
        return shape

    def new_cache(self, shape: Shape, batch: int, dtype: np.dtype[Any]) -> State | None:
        tokens, width = shape
        size = batch, self.key_value_heads, tokens, width // self.num_heads
        return {name: array(np.zeros(size, dtype)) for name in CACHE} if self.causal else None

    def projected_rows(self, width: int) -> tuple[int, int, int]:
        """The rows of "in_proj_weight" that give queries, keys and values."""
        others = width // self.num_heads * self.key_value_heads
        return width, others, others

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        width = shape[-1]
        rows = sum(self.projected_rows(width))
        weights: dict[str, Shape] = {"in_proj_weight": (rows, width), "out_proj.weight": (width, width)}
        if self.bias:
            weights |= {"in_proj_bias": (rows,), "out_proj.bias": (width,)}
        if self.qk_norm:
            weights |= {"q_norm.weight": (width // self.num_heads,), "k_norm.weight": (width // self.num_heads,)}
        return weights

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        gains = {"in_proj_weight": self.init_gain, "out_proj.weight": self.init_gain * self.out_init_gain}
        params: Params = {}
        for path, size in self.parameter_shapes(shape).items():
            *module, name = path.split(".")
            inside = params.setdefault(module[0], {}) if module else params
            if path in gains:
                inside[name] = drawn(self.weight_init, size, rng, dtype, gains[path])
            else:
                inside[name] = array(np.full(size, float("norm" in path), dtype))
        return params, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        drops = self.dropout > 0 and mode.is_training(self)
        if drops and mode.rng is None:
            raise AdtrainError("multihead_attention: found no rng in training, expected Mode(training=True, rng=...)")
        projected = self._linear(x, params, "in_proj_")
        if mode.token is not None:
            joined, state = self._attended(projected, params, state, mode.token)
            return self._linear(joined, params["out_proj"], ""), state
        if self._by_position or state:
            by_head = self._by_head(projected, params)
            if state:
                state = dict(zip(CACHE, self._keys_and_values(by_head), strict=True))
            projected = self._side_by_side(by_head)
        joined = ops.self_attention(
            projected,
            self.num_heads,
            causal=self.causal,
            dropout=self.dropout if drops else 0.0,
            rng=mode.rng,
            stream=mode.stream,
            window=self.window,
            soft_cap=self.soft_cap,
            starts=mode.starts,
        )
        return self._linear(joined, params["out_proj"], ""), state

    def _by_head(self, projected: Value, params: Params, token: Token | None = None) -> Value:
        """Queries, keys and values, (batch, tokens, all heads, width): normalised and rotated."""
        heads, others = self.num_heads, self.key_value_heads
        width = projected.shape[-1] // (heads + 2 * others)
        x = ops.reshape(projected, (*projected.shape[:2], heads + 2 * others, width))
        if self.qk_norm:
            x = self._normalised(x, params)
        return x if self.rotary_base is None else _rotated(x, self.rotary_base, heads + others, token)

    def _side_by_side(self, by_head: Value) -> Value:
        """Queries, keys and values in rows, as many heads of each: heads of keys and values are repeated."""
        batch, tokens, _, width = by_head.shape
        heads, others = self.num_heads, self.key_value_heads
        if others < heads:
            repeated = _repeated(by_head[:, :, heads:], heads // others)
            by_head = ops.concatenate([by_head[:, :, :heads], repeated], axis=2)
        return ops.reshape(by_head, (batch, tokens, 3 * heads * width))

    def _keys_and_values(self, by_head: Value) -> list[Value]:
        """Both, (batch, heads of keys, tokens, width)."""
        heads, others = self.num_heads, self.key_value_heads
        starts = heads, heads + others
        return [ops.transpose(by_head[:, :, start : start + others], (0, 2, 1, 3)) for start in starts]

    def _attended(self, projected: Value, params: Params, state: State, token: Token) -> tuple[Value, State]:
        """The output of the heads for one token, (batch, 1, width), and the cache with its key and value.

        The queries that share a head of keys are the rows of one attention, so heads are not repeated.
        """
        by_head = self._by_head(projected, params, token)
        batch, _, _, width = by_head.shape
        heads, shared = self.num_heads, self.key_value_heads
        keys, values = (
            ops.put_rows(state[name], by_head[:, 0, first : first + shared], token.position, axis=2)
            for name, first in zip(CACHE, (heads, heads + shared), strict=True)
        )
        seen = token.seen if self.window is None else token.seen & ops.less(token.distance, self.window)
        queries = ops.reshape(by_head[:, 0, :heads], (batch, shared, heads // shared, width))
        found = ops.attention(queries, keys, values, mask=seen, soft_cap=self.soft_cap)
        return ops.reshape(found, (batch, 1, heads * width)), dict(zip(CACHE, (keys, values), strict=True))

    def _normalised(self, x: Value, params: Params) -> Value:
        """Queries and keys divided by their root mean squares, times the weights; values as they are."""
        heads, others, width = self.num_heads, self.key_value_heads, x.shape[-1]
        weights = [
            ops.broadcast_to(params["q_norm"]["weight"], (heads, width)),
            ops.broadcast_to(params["k_norm"]["weight"], (others, width)),
            ops.ones((others, width), x.dtype, x.device),
        ]
        is_value = np.arange(heads + 2 * others).reshape(-1, 1) >= heads + others
        scale = ops.rsqrt(ops.mean(ops.square(x), -1, keepdims=True) + QK_NORM_EPS)
        return x * ops.where(array(is_value, device=x.device), 1.0, scale) * ops.concatenate(weights)

    def _linear(self, x: Value, params: Params, prefix: str) -> Value:
        y = product(x, params, f"{prefix}weight")
        return ops.add(y, params[f"{prefix}bias"]) if self.bias else y


def _rotated(x: Value, base: float, heads: int, token: Token | None = None, forward: bool = True) -> Value:
    """The first `heads` heads of x (batch, tokens, all heads, n), rotated by their positions, from angle 0 of token 0.

    Both numbers of a pair are read by one gather. The derivative is the rotation by the negative angles, so it needs no
    scatter.
    """
    tokens, every, n = x.shape[1:]
    positions = np.arange(tokens if token is None else token.length)
    angles = positions[:, None, None] * base ** (-np.arange(n // 2) / (n // 2))
    sines = np.sin(angles) if forward else -np.sin(angles)
    tables = np.concatenate([np.cos(angles)] * 2, axis=-1), np.concatenate([-sines, sines], axis=-1)
    rows: list[Value] = [array(table.astype(x.dtype), device=x.device) for table in tables]
    cos, sin = rows if token is None else map(token.row_of, rows)
    others = array(np.roll(np.arange(n, dtype=np.uint32), n // 2), device=x.device)
    is_rotated = array(np.arange(every).reshape(-1, 1) < heads, device=x.device)

    def rotation(x: Value) -> tuple[Value, None]:
        return ops.where(is_rotated, x * cos + ops.take(x, others, axis=3) * sin, x), None

    rotate = custom_vjp(rotation, lambda _, ct: (_rotated(ct, base, heads, token, not forward),))
    found: Value = rotate(x)
    return found


def _repeated(x: Value, times: int) -> Value:
    """x (batch, tokens, n, width) with each of its n heads several times, one after the other."""
    batch, tokens, n, width = x.shape
    groups = ops.broadcast_to(ops.expand_dims(x, 3), (batch, tokens, n, times, width))
    return ops.reshape(groups, (batch, tokens, n * times, width))


ACTIVATIONS: dict[str, Module] = {
    "relu": ReLU(),
    "gelu": GELU(),
    "gelu_tanh": GELU("tanh"),
    "silu": SiLU(),
    "squared_relu": SquaredReLU(),
    "swiglu": SiLU(),
}
"""The activations of feed-forward networks. With swiglu it is that of the gate."""


class TransformerLayer(Container):
    """Self-attention, then a feed-forward network, each with dropout, a residual sum and normalisation.

    The feed-forward network is two linear layers with an activation between them. With a child "gate" the activation
    of this linear layer is multiplied by the first one's output.
    """

    CHILDREN: ClassVar = ("norm1", "self_attn", "norm2", "gate", "linear1", "linear2")
    """The names of the children, in the order in which they run with `normalises_first`."""
    dropout: Fraction
    activation: str

    @property
    def normalises_first(self) -> bool:
        """Whether the inputs of attention and feed-forward network are normalised, and not the sums."""
        return True

    @abstractmethod
    def layers(self, shape: Shape) -> dict[str, Module]:
        """The children by name, in the order of CHILDREN, for tokens of `shape`."""

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        layers = self.layers(shape)
        normalised_sums = "self_attn", "norm1", "gate", "linear1", "linear2", "norm2"
        for name in self.CHILDREN if self.normalises_first else normalised_sums:
            if name in layers:
                inner = layers["linear1"].output_shape(shape) if name == "linear2" else shape
                yield name, layers[name], inner

    def by_token(self, shape: Shape) -> bool:
        return True

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, TOKEN_AXES)
        for name, child, inner in self.children(shape):
            child_output_shape(name, child, inner)
        return shape

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        layers = self.layers(x.shape[1:])
        drop, activation, new = Dropout(self.dropout), ACTIVATIONS[self.activation], {}

        def run(name: str, x: Value) -> Value:
            y, found = run_child(name, f"{name}.{layers[name].kind()}", layers[name], params, state, x, mode)
            new.update(found)
            return y

        def dropped(name: str, x: Value) -> Value:
            return drop.forward({}, {}, x, mode.at(name))[0]

        def attend(x: Value) -> Value:
            return dropped("dropout1", run("self_attn", x))

        def feed_forward(x: Value) -> Value:
            gated = "gate" in layers
            hidden = activation.forward({}, {}, run("gate" if gated else "linear1", x), mode)[0]
            if gated:
                hidden = ops.mul(hidden, run("linear1", x))
            return dropped("dropout2", run("linear2", dropped("dropout", hidden)))

        if self.normalises_first:
            x = ops.add(x, attend(run("norm1", x)))
            return ops.add(x, feed_forward(run("norm2", x))), new
        x = run("norm1", ops.add(x, attend(x)))
        return run("norm2", ops.add(x, feed_forward(x))), new


@dataclass(frozen=True)
class TransformerEncoderLayer(TransformerLayer):
    """Self-attention, then two linear layers, each with dropout, a residual sum and layer normalisation.

    The names of options and parameters are those of torch.nn.TransformerEncoderLayer. The sums are normalised (Vaswani
    et al. 2017), or with `norm_first` the inputs of attention and of the linear layers (R. Xiong et al., "On layer
    normalization in the transformer architecture", 2020).
    """

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

    @property
    def normalises_first(self) -> bool:
        return self.norm_first

    def layers(self, shape: Shape) -> dict[str, Module]:
        norm = LayerNorm(eps=self.layer_norm_eps)
        attention = MultiheadAttention(self.nhead, dropout=self.dropout, causal=self.causal)
        linear1, linear2 = (Linear(n, weight_init="xavier_uniform") for n in (self.dim_feedforward, shape[-1]))
        return {"norm1": norm, "self_attn": attention, "norm2": norm, "linear1": linear1, "linear2": linear2}

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, TOKEN_AXES)
        check_inferred(self, "d_model", shape[-1], shape)
        if shape[-1] % self.nhead:
            raise ShapeError(
                f"transformer_encoder_layer: nhead {self.nhead} does not divide the input's width {shape[-1]}: {shape}"
            )
        return super().output_shape(shape)


@dataclass(frozen=True)
class DecoderLayer(TransformerLayer):
    """The layer of a language model: x + attention(norm(x)), then x + feed_forward(norm(x)).

    The options of the attention are those of `MultiheadAttention`. The feed-forward network has `dim_feedforward`
    numbers between its linear layers, by default four times the width. The activation swiglu is silu of one linear
    layer, "gate", times another (N. Shazeer, "GLU variants improve transformer", 2020). `dropout` drops the
    probabilities of the attention, its output, and what the second linear layer takes and gives.

    Initial weights are multiplied by `init_gain`. `depth`, the number of these layers in the network, also divides
    those of the linear layers before both sums by sqrt(2 depth) (A. Radford et al., GPT-2, 2019). `bias` is that of
    linear layers and attention.
    """

    num_heads: Size
    _: KW_ONLY
    dim_feedforward: Size | None = None
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "squared_relu", "swiglu"] = "gelu"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: NonNegative = 1e-5
    bias: bool = True
    dropout: Fraction = 0.0
    causal: bool = True
    num_key_value_heads: Size | None = None
    window: Size | None = None
    rotary_base: Positive | None = None
    qk_norm: bool = False
    soft_cap: Positive | None = None
    depth: Size | None = None
    weight_init: WeightInit = "xavier_uniform"
    init_gain: NonNegative = 1.0

    def layers(self, shape: Shape) -> dict[str, Module]:
        norm = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}[self.norm](eps=self.norm_eps)
        out_gain = 1.0 if self.depth is None else 1 / sqrt(2 * self.depth)
        shared = {x.name: getattr(self, x.name) for x in fields(MultiheadAttention) if hasattr(self, x.name)}
        attention = MultiheadAttention(**shared, out_init_gain=out_gain)

        def linear(features: int, gain: float) -> Linear:
            return Linear(features, bias=self.bias, weight_init=self.weight_init, init_gain=gain)

        hidden = linear(self.dim_feedforward or 4 * shape[-1], self.init_gain)
        gate = {"gate": hidden} if self.activation == "swiglu" else {}
        linear2 = linear(shape[-1], self.init_gain * out_gain)
        return {"norm1": norm, "self_attn": attention, "norm2": norm, **gate, "linear1": hidden, "linear2": linear2}
