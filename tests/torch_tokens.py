"""PyTorch's counterparts of the layers of transformers, with the same names of arrays."""

from __future__ import annotations

from typing import Any

import pytest

from adtrain import nn
from adtrain.nn.module import pair
from adtrain.nn.tokens import sinusoids

torch: Any = pytest.importorskip("torch")


class Attention(torch.nn.MultiheadAttention):
    def __init__(self, layer: nn.MultiheadAttention, width: int) -> None:
        super().__init__(width, layer.num_heads, layer.dropout, layer.bias, batch_first=True)
        self.causal = layer.causal

    def forward(self, x: Any) -> Any:
        return super().forward(x, x, x, need_weights=False, attn_mask=causal(x) if self.causal else None)[0]


class EncoderLayer(torch.nn.TransformerEncoderLayer):
    def __init__(self, layer: nn.TransformerEncoderLayer, width: int) -> None:
        super().__init__(
            width, layer.nhead, layer.dim_feedforward, layer.dropout, layer.activation, layer.layer_norm_eps, True,
            layer.norm_first,
        )  # fmt: skip
        self.causal = layer.causal

    def forward(self, x: Any) -> Any:
        return super().forward(x, causal(x) if self.causal else None)


class GroupedAttention(torch.nn.Module):
    """Attention with every option, from its definition: an array of queries by keys and a mask."""

    def __init__(self, layer: nn.MultiheadAttention, width: int) -> None:
        super().__init__()
        self.layer = layer
        shapes = layer.parameter_shapes((1, width))
        for name, shape in shapes.items():
            if name.startswith("in_proj"):
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        self.out_proj = torch.nn.Linear(width, width, bias=layer.bias)
        if layer.qk_norm:
            self.q_norm, self.k_norm = (torch.nn.RMSNorm(width // layer.num_heads, 1e-6) for _ in range(2))

    def forward(self, x: Any) -> Any:
        layer, (batch, tokens, width) = self.layer, x.shape
        size = width // layer.num_heads
        projected = torch.nn.functional.linear(x, self.in_proj_weight, getattr(self, "in_proj_bias", None))
        parts = projected.split(layer.projected_rows(width), -1)
        q, k, v = (part.reshape(batch, tokens, -1, size).transpose(1, 2) for part in parts)
        if layer.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if layer.rotary_base is not None:
            q, k = (self.rotated(x, layer.rotary_base) for x in (q, k))
        k, v = (x.repeat_interleave(layer.num_heads // layer.key_value_heads, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / size**0.5
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        if layer.causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if layer.window is not None:
            scores = scores.masked_fill(distance.abs() >= layer.window, -torch.inf)
        return self.out_proj((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape))

    @staticmethod
    def rotated(x: Any, base: float) -> Any:
        """Each pair of numbers as a complex number, times that of its angle."""
        half = x.shape[-1] // 2
        rates = torch.tensor(base, dtype=x.dtype) ** (-torch.arange(half, dtype=x.dtype) / half)
        angles = torch.arange(x.shape[-2])[:, None] * rates
        pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1)


class DecoderLayer(torch.nn.Module):
    def __init__(self, layer: nn.DecoderLayer, width: int) -> None:
        super().__init__()
        self.activation = layer.activation
        for name, child, (_, size) in layer.children((1, width)):
            if isinstance(child, nn.MultiheadAttention):
                part = GroupedAttention(child, size)
            elif isinstance(child, nn.Linear):
                part = torch.nn.Linear(size, child.out_features, bias=child.bias)
            elif isinstance(child, nn.RMSNorm):
                part = torch.nn.RMSNorm(size, child.eps)
            else:
                part = torch.nn.LayerNorm(size, layer.norm_eps)
            self.add_module(name, part)

    def hidden(self, x: Any) -> Any:
        y, F = self.linear1(x), torch.nn.functional
        if self.activation == "swiglu":
            return F.silu(self.gate(x)) * y
        if self.activation == "squared_relu":
            return F.relu(y).square()
        name, _, approximate = self.activation.partition("_")
        return F.gelu(y, approximate=approximate or "none") if name == "gelu" else getattr(F, name)(y)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(self.hidden(self.norm2(x)))


class ClassToken(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, width))

    def forward(self, x: Any) -> Any:
        return torch.cat([self.weight.expand(len(x), 1, -1), x], 1)


class Squared(torch.nn.ReLU):
    def forward(self, x: Any) -> Any:
        return super().forward(x) ** 2


class Capped(torch.nn.Module):
    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Any) -> Any:
        return self.cap * torch.tanh(x / self.cap)


class Positions(torch.nn.Module):
    def __init__(self, layer: nn.PositionalEmbedding, shape: nn.Shape) -> None:
        super().__init__()
        learned = layer.encoding == "learned"
        self.weight = torch.nn.Parameter(torch.zeros(shape)) if learned else torch.tensor(sinusoids(*shape))

    def forward(self, x: Any) -> Any:
        return x + self.weight


class Patches(torch.nn.Module):
    def __init__(self, layer: nn.Patches) -> None:
        super().__init__()
        size = pair(layer.patch_size)
        self.unfold = torch.nn.Unfold(size, stride=size)

    def forward(self, x: Any) -> Any:
        return self.unfold(x).transpose(1, 2)


class Mean(torch.nn.Module):
    def __init__(self, layer: nn.Mean) -> None:
        super().__init__()
        self.dim = layer.dim

    def forward(self, x: Any) -> Any:
        return x.mean(self.dim)


def causal(x: Any) -> Any:
    return torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)


def torch_tokens(layer: nn.Module, shape: nn.Shape) -> Any:
    """The same layer in PyTorch for input samples of `shape`; None for another layer."""
    match layer:
        case nn.MultiheadAttention(is_plain=False):
            return GroupedAttention(layer, shape[-1])
        case nn.MultiheadAttention():
            return Attention(layer, shape[-1])
        case nn.DecoderLayer():
            return DecoderLayer(layer, shape[-1])
        case nn.SquaredReLU():
            return Squared()
        case nn.SoftCap():
            return Capped(layer.cap)
        case nn.ClassToken():
            return ClassToken(shape[-1])
        case nn.TransformerEncoderLayer():
            return EncoderLayer(layer, shape[-1])
        case nn.PositionalEmbedding():
            return Positions(layer, shape)
        case nn.Patches():
            return Patches(layer)
        case nn.Mean():
            return Mean(layer)
    return None
