"""Layers that a user writes from operations: a gated layer with weights, and one for each group of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import adtrain as ad
from adtrain import nn, ops
from adtrain.core.array import Value


@dataclass(frozen=True)
class Composed(nn.Module):
    """A layer that is a function of its input."""

    function: Callable[[Value], Value]
    output: tuple[int, ...]

    def output_shape(self, shape: nn.Shape) -> nn.Shape:
        return self.output

    def forward(self, params: nn.Params, state: nn.State, x: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        return self.function(x), state


@dataclass(frozen=True)
class Gated(nn.Module):
    """(x Wᵀ) sigmoid(x Vᵀ + b), with W divided by the length of its rows."""

    out_features: int

    def output_shape(self, shape: nn.Shape) -> nn.Shape:
        return (*shape[:-1], self.out_features)

    def parameter_shapes(self, shape: nn.Shape) -> dict[str, nn.Shape]:
        weight = (self.out_features, shape[-1])
        return {"weight": weight, "gate.weight": weight, "gate.bias": (self.out_features,)}

    def new_arrays(self, shape: nn.Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        arrays = {name: ad.array(rng.normal(size=s).astype(dtype)) for name, s in self.parameter_shapes(shape).items()}
        return {"weight": arrays["weight"], "gate": {k: arrays[f"gate.{k}"] for k in ("weight", "bias")}}, {}

    def forward(self, params: nn.Params, state: nn.State, x: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        weight, gate = params["weight"], params["gate"]
        unit = weight / ops.sqrt(ops.sum(ops.square(weight), axis=1, keepdims=True))
        opened = ops.sigmoid(ops.matmul(x, gate["weight"], transpose_b=True) + gate["bias"])
        return ops.matmul(x, unit, transpose_b=True) * opened, state


def _heads(x: Value) -> Value:
    """(N, 4, 6) as queries of two heads: (N, 2, 4, 3)."""
    return ops.transpose(ops.reshape(x, (x.shape[0], 4, 2, 3)), (0, 2, 1, 3))


def _integers(x: Value) -> Value:
    return ops.astype(ops.floor(ops.abs(x)), "int32")


OPERATIONS: dict[str, tuple[Callable[[Value], Value], tuple[int, ...]]] = {
    "arithmetic": (lambda x: (2.0 - x) * x / (1.5 + ops.square(x)) - ops.reciprocal(x * x + 1), (4, 6)),
    "exponentials": (lambda x: ops.exp(-x * x) + ops.log(1 + ops.abs(x)) + ops.expm1(x) + ops.log1p(x * x), (4, 6)),
    "roots": (lambda x: ops.sqrt(x * x + 1) + ops.rsqrt(x * x + 2) + ops.hypot(x, x + 1), (4, 6)),
    "powers": (lambda x: ops.abs(x) ** 1.5 + x**3 + ops.power(ops.abs(x) + 1, x), (4, 6)),
    "waves": (lambda x: ops.sin(x) + ops.cos(x) * ops.tanh(x) + ops.erf(x), (4, 6)),
    "rounding": (lambda x: ops.floor(x) + ops.ceil(3 * x) + ops.round(5 * x) + ops.sign(x), (4, 6)),
    "division": (lambda x: ops.floor_divide(x, 0.3) + ops.remainder(x, 0.7), (4, 6)),
    "comparisons": (lambda x: ops.where((x > 0.5) | ~(x <= -0.5) & ops.isfinite(x), x, -2 * x), (4, 6)),
    "predicates": (lambda x: ops.where(ops.isnan(x) | ops.isinf(x) | (x != x) | ops.equal(x, 0.0), 0.0, x), (4, 6)),
    "limits": (lambda x: ops.clip(x, -0.4, 0.3) + ops.maximum(x, 0.1) + ops.minimum(x, 0.2) + ops.clip(x, 0.1), (4, 6)),
    "activations": (lambda x: ops.silu(x) + ops.gelu(x) + ops.elu(x, 0.7) + ops.leaky_relu(x, 0.2), (4, 6)),
    "numbers of the batch": (lambda x: x + ops.ones((x.shape[0], 1, 6)) * ops.arange(6.0), (4, 6)),
    "an outer product": (lambda x: x[:, :, :1] * x[:, 0][:, None, :] + ops.ones((4, 6)), (4, 6)),
    "sums": (lambda x: ops.sum(x, axis=2) + ops.max(x, axis=2) + ops.min(x, axis=2) + ops.mean(x, axis=2), (4,)),
    "moments": (lambda x: ops.std(x, axis=1) + ops.logsumexp(x, axis=1), (6,)),
    "softmax": (lambda x: ops.softmax(x, axis=1) + ops.log_softmax(x, axis=2), (4, 6)),
    "running sums": (lambda x: ops.cumsum(x, axis=1) + ops.flip(x, (1, 2)), (4, 6)),
    "order": (lambda x: ops.sort(x, axis=2) + ops.astype(ops.argsort(x, axis=2), "float32"), (4, 6)),
    "the first of an order": (lambda x: ops.topk(x, 2, axis=2)[0], (4, 2)),
    "the largest": (lambda x: ops.one_hot(ops.argmax(x, axis=2), 6) * x, (4, 6)),
    "indices": (lambda x: ops.take(x, np.array([3, 0, 0]), axis=1), (3, 6)),
    "indices along": (lambda x: ops.take_along_axis(x, ops.argmax(x, axis=2)[:, :, None], axis=2), (4, 1)),
    "slices": (lambda x: ops.concatenate([x[:, ::2], x[:, 1:3, :]], axis=1), (4, 6)),
    "padding": (lambda x: ops.pad(x, ((0, 0), (1, 2), (0, 1)), value=0.5), (7, 7)),
    "transposes": (lambda x: ops.reshape(ops.transpose(x, (0, 2, 1)), (x.shape[0], 24)), (24,)),
    "rolls": (lambda x: ops.roll(x, 2, axis=2) + ops.tile(x[:, :, :3], (1, 1, 2)), (4, 6)),
    "products": (lambda x: ops.matmul(x, x, transpose_b=True), (4, 4)),
    "transposed products": (lambda x: ops.matmul(x, x, transpose_a=True), (6, 6)),
    "products with a matrix": (lambda x: ops.matmul(x, np.eye(6, 3, dtype="float32")), (4, 3)),
    "einsum": (lambda x: ops.einsum("nij,nkj->nik", x, x), (4, 4)),
    "integers": (lambda x: ops.astype(ops.remainder(_integers(x) * 3 + 1, 4), "float32"), (4, 6)),
    "normalisation": (lambda x: ops.layer_norm(x, 6) + ops.group_norm(x, 2), (4, 6)),
    "attention": (lambda x: ops.attention(_heads(x), _heads(x), _heads(x), causal=True), (2, 4, 3)),
    "convolution": (lambda x: ops.conv1d(x, np.ones((2, 4, 3), "float32"), padding=1), (2, 6)),
    "pooling": (lambda x: ops.max_pool1d(x, 2) + ops.avg_pool1d(x, 2), (4, 3)),
}
"""Functions of (N, 4, 6) with the shape of an output sample."""
