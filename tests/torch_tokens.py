"""PyTorch's counterparts of the layers on tokens, with the same names of arrays."""

from __future__ import annotations

from typing import Any

import pytest

from adtrain import nn
from adtrain.nn.fields import pair
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
    """The same layer in PyTorch for input samples of `shape`; None for a layer that is not on tokens."""
    match layer:
        case nn.MultiheadAttention():
            return Attention(layer, shape[-1])
        case nn.TransformerEncoderLayer():
            return EncoderLayer(layer, shape[-1])
        case nn.PositionalEmbedding():
            return Positions(layer, shape)
        case nn.Patches():
            return Patches(layer)
        case nn.Mean():
            return Mean(layer)
    return None
