"""The layers of neural fields in PyTorch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from adtrain import nn
from adtrain.ops.hash_grid import PRIMES

torch: Any = pytest.importorskip("torch")


def hash_grid(points: Any, table: Any, resolutions: tuple[int, ...], size: int) -> Any:
    """The encoding of points in the box as the paper defines it, level after level and corner after corner."""
    d, first, found = points.shape[1], 0, []
    for resolution in resolutions:
        scaled = points * resolution
        cell = torch.floor(scaled.detach()).clamp(0, resolution - 1)
        fraction = scaled - cell
        count = min((resolution + 1) ** d, size)
        features = torch.zeros(len(points), table.shape[1], dtype=table.dtype)
        for corner in product((0, 1), repeat=d):
            at = (cell.long() + torch.tensor(corner)).tolist()
            if (resolution + 1) ** d <= size:
                rows = [sum(x * (resolution + 1) ** i for i, x in enumerate(place)) for place in at]
            else:
                rows = []
                for place in at:
                    number = 0
                    for x, prime in zip(place, PRIMES, strict=False):
                        number ^= x * prime % 2**32
                    rows.append(number % size)
            weight = torch.ones(len(points), dtype=table.dtype)
            for i, end in enumerate(corner):
                weight = weight * (fraction[:, i] if end else 1 - fraction[:, i])
            features = features + weight[:, None] * table[first + torch.tensor(rows)]
        found.append(features)
        first += count
    return torch.cat(found, 1)


class Sine(torch.nn.Linear):
    def __init__(self, layer: nn.Sine, width: int) -> None:
        super().__init__(width, layer.out_features)
        self.omega = layer.omega

    def forward(self, x: Any) -> Any:
        return torch.sin(self.omega * super().forward(x))


class FourierFeatures(torch.nn.Module):
    def __init__(self, layer: nn.FourierFeatures, coordinates: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.zeros(layer.frequencies, coordinates))

    def forward(self, x: Any) -> Any:
        angles = 2 * torch.pi * torch.einsum("ni,fi->nf", x, self.frequencies)
        return torch.cat([torch.cos(angles), torch.sin(angles)], 1)


class HashGrid(torch.nn.Module):
    def __init__(self, layer: nn.HashGrid, coordinates: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = torch.nn.Parameter(torch.zeros(layer.parameter_shapes((coordinates,))["weight"]))

    def forward(self, x: Any) -> Any:
        in_box = (x / 2 + 0.5).clamp(0, 1)
        return hash_grid(in_box, self.weight, self.layer.resolutions, 1 << self.layer.log2_table_size)


def torch_field(layer: nn.Module, shape: nn.Shape) -> Any:
    """The same layer in PyTorch for input samples of `shape`; None for another layer."""
    match layer:
        case nn.Sine():
            return Sine(layer, shape[-1])
        case nn.FourierFeatures():
            return FourierFeatures(layer, shape[-1])
        case nn.HashGrid():
            return HashGrid(layer, shape[-1])
    return None
