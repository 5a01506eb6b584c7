"""Linear layers, also with low-rank products added to their weight, and embeddings.

Also layers of neural fields, on the coordinates of points: encodings, and linear layers followed by a sine.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import pi, sqrt
from typing import Annotated, Any

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.custom import custom_vjp
from adtrain.core.errors import AdtrainError, OptionError
from adtrain.core.options import Bounds
from adtrain.nn.init import WeightInit, WeightLayer
from adtrain.nn.module import Mode, Module, Params, Shape, State, check_features, check_inferred, check_ndim
from adtrain.ops.hash_grid import grid_levels
from adtrain.option_types import NonNegative, Positive, Size

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


COORDINATES = ("coordinates",)
TABLE_BOUND = 1e-4
"""The largest magnitude of the initial numbers of a hash grid's table (Müller et al. 2022)."""


@dataclass(frozen=True)
class HashGrid(Module):
    """Coordinates in [-1, 1] to features of grids from coarse to fine: (coordinates,) -> (levels * features,).

    There are 1 to 4 coordinates. A level divides each axis into cells, from `base_resolution` to `finest_resolution` in
    geometric progression. The corners of cells have rows of the table, and a point gets those of its cell interpolated.
    A level has at most 2^log2_table_size rows; a hash chooses the row of a corner if there are more corners (T. Müller
    et al., "Instant neural graphics primitives", 2022). The "weight" (rows, features) starts with U(-1e-4, 1e-4).
    """

    levels: Size = 16
    _: KW_ONLY
    features: Size = 2
    log2_table_size: Annotated[int, Bounds(ge=1, le=31)] = 19
    base_resolution: Size = 16
    finest_resolution: Size = 2048

    def __post_init__(self) -> None:
        if self.finest_resolution < self.base_resolution:
            found = f"found finest_resolution {self.finest_resolution} below base_resolution {self.base_resolution}"
            raise OptionError(f"hash_grid: {found}, expected at least as many cells")

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The cells along an axis in each level."""
        growth = (self.finest_resolution / self.base_resolution) ** (1 / max(self.levels - 1, 1))
        return tuple(int(self.base_resolution * growth**i + 1e-6) for i in range(self.levels))

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, COORDINATES)
        grid_levels(shape[0], self.resolutions, 1 << self.log2_table_size)
        return (self.levels * self.features,)

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        _, rows = grid_levels(shape[0], self.resolutions, 1 << self.log2_table_size)
        return {"weight": (rows, self.features)}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        size = self.parameter_shapes(shape)["weight"]
        return {"weight": array(rng.uniform(-TABLE_BOUND, TABLE_BOUND, size).astype(dtype))}, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        in_unit_box = x * 0.5 + 0.5
        return ops.hash_grid(in_unit_box, params["weight"], self.resolutions, 1 << self.log2_table_size), state


@dataclass(frozen=True)
class FourierFeatures(Module):
    """cos(2π B x), then sin(2π B x), for a matrix B that is not trained: (coordinates,) -> (2 * frequencies,).

    B, the array "frequencies" of the state, is drawn from N(0, scale²). A large scale suits fine detail (M. Tancik et
    al., "Fourier features let networks learn high frequency functions in low dimensional domains", 2020).
    """

    frequencies: Size
    _: KW_ONLY
    scale: Positive = 10.0

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, COORDINATES)
        return (2 * self.frequencies,)

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        drawn = rng.normal(0, self.scale, (self.frequencies, shape[0]))
        return {}, {"frequencies": array(drawn.astype(dtype))}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        with ops.matmul_precision("full"):  # angles are large
            angles = ops.matmul(x, state["frequencies"], transpose_b=True) * (2 * pi)
        return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=1), state


@dataclass(frozen=True)
class Sine(Module):
    """sin(omega (x Wᵀ + b)) over the last axis: (..., in_features) -> (..., out_features).

    The weight starts with U(-c, c), c = √(6 / in_features) / omega, or 1 / in_features in the `first` layer, so that
    the sines of all layers have the same distribution (V. Sitzmann et al., "Implicit neural representations with
    periodic activation functions", 2020). The bias starts with U(-c, c), c = 1 / √in_features.
    """

    out_features: Size
    _: KW_ONLY
    omega: Positive = 30.0
    first: bool = False

    def output_shape(self, shape: Shape) -> Shape:
        check_features(self, shape)
        return (*shape[:-1], self.out_features)

    def by_token(self, shape: Shape) -> bool:
        return len(shape) > 1

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"weight": (self.out_features, shape[-1]), "bias": (self.out_features,)}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        bounds = {"weight": 1 / shape[-1] if self.first else sqrt(6 / shape[-1]) / self.omega}
        bounds["bias"] = 1 / sqrt(shape[-1])
        sizes = self.parameter_shapes(shape)
        return {name: array(rng.uniform(-c, c, sizes[name]).astype(dtype)) for name, c in bounds.items()}, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.sin(self.omega * ops.add(product(x, params, "weight"), params["bias"])), state
