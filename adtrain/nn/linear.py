"""Linear layers, also with low-rank products added to their weight, and embeddings."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.custom import custom_vjp
from adtrain.core.errors import AdtrainError
from adtrain.nn.init import WeightInit, WeightLayer
from adtrain.nn.module import Mode, Params, Shape, State, check_features, check_inferred
from adtrain.option_types import NonNegative, Size

A, B = "_lora_a", "_lora_b"
"""The ends of the names of matrices whose product is added to a weight (`LowRankSequential`)."""


def product(x: Value, params: Params, name: str) -> Value:
    """x Wᵀ, where W is the weight `name` plus the product of its small matrices, if it has them."""
    weight = params[name]
    if name + A in params:
        return _adapted_product(x, weight, params[name + A], params[name + B])
    return ops.matmul(x, weight, transpose_b=True)


def _adapted(x: Value, weight: Value, a: Value, b: Value) -> tuple[Value, tuple[Value, ...]]:
    """x (W + B A)ᵀ, and the arguments, which its derivative needs."""
    return ops.matmul(x, weight + ops.matmul(b, a), transpose_b=True), (x, weight, a, b)


def _adapted_gradients(residuals: tuple[Value, ...], ct: Value) -> tuple[Value, ...]:
    """The cotangents of x, W, A and B. Those of the small matrices do not need that of W."""
    x, weight, a, b = residuals
    rows, ct_rows = (ops.reshape(value, (-1, value.shape[-1])) for value in (x, ct))
    of_a = ops.matmul(ops.matmul(ct_rows, b), rows, transpose_a=True)
    of_b = ops.matmul(ct_rows, ops.matmul(rows, a, transpose_b=True), transpose_a=True)
    of_x = ops.matmul(ct, weight + ops.matmul(b, a))
    return of_x, ops.matmul(ct_rows, rows, transpose_a=True), of_a, of_b


_adapted_product = custom_vjp(_adapted, _adapted_gradients)


@dataclass(frozen=True)
class Linear(WeightLayer):
    """x Wᵀ + b over the last axis: (..., in_features) -> (..., out_features); weight (out_features, in_features).

    With `tied` W is the weight of the embedding in the same list of layers, so the layer has none of its own (O. Press
    and L. Wolf, "Using the output embedding to improve language models", 2017).
    """

    left_out = ("in_features", int, "in_features is inferred from the input")
    out_features: Size
    _: KW_ONLY
    bias: bool = True
    in_features: Size | None = None
    weight_init: WeightInit = "kaiming_uniform"
    init_gain: NonNegative = 1.0
    tied: bool = False

    def output_shape(self, shape: Shape) -> Shape:
        check_features(self, shape)
        check_inferred(self, "in_features", shape[-1], shape)
        return (*shape[:-1], self.out_features)

    def by_token(self, shape: Shape) -> bool:
        return len(shape) > 1

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {} if self.tied else {"weight": (self.out_features, shape[-1])}
        return shapes | {"bias": (self.out_features,)} if self.bias else shapes

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        if self.tied and "weight" not in params:
            raise AdtrainError("linear: tied is for a layer in nn.Sequential with one embedding")
        y = product(x, params, "weight")
        return (ops.add(y, params["bias"]) if self.bias else y), state


@dataclass(frozen=True)
class Embedding(WeightLayer):
    """A row of the weight for each integer: (...) -> (..., embedding_dim); weight (num_embeddings, embedding_dim).

    Floats are rounded towards 0 to integers. Raises ShapeError for a number that is not in [0, num_embeddings).
    """

    num_embeddings: Size
    _: KW_ONLY
    embedding_dim: Size
    weight_init: WeightInit = "normal"
    init_gain: NonNegative = 1.0

    def output_shape(self, shape: Shape) -> Shape:
        return (*shape, self.embedding_dim)

    def by_token(self, shape: Shape) -> bool:
        return True

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        indices = ops.astype(x, np.int32) if x.dtype.kind == "f" else x
        return ops.embedding(indices, params["weight"]), state
