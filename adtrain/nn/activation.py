"""Activations, dropout and scaling, which keep the shape; and layers that move elements and compute nothing."""

from __future__ import annotations

from dataclasses import KW_ONLY, astuple, dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError, OptionError, ShapeError
from adtrain.core.options import words_in_python
from adtrain.nn.module import IMAGE_AXES, Mode, Module, Params, Shape, State, axis_of, check_ndim
from adtrain.option_types import Axis, Fraction, Indices, Number, OpenShape, Positive, Size


class _Elementwise(Module):
    """A layer that keeps the shape, and whose numbers depend on their own place in the input."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def by_token(self, shape: Shape) -> bool:
        return True


@dataclass(frozen=True)
class _Activation(_Elementwise):
    """The operation of the same name in `ops`. The layer's options are its arguments after `x`."""

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return getattr(ops, self.kind())(x, *astuple(self)), state


@dataclass(frozen=True)
class ReLU(_Activation):
    """max(x, 0)."""


@dataclass(frozen=True)
class SquaredReLU(_Activation):
    """max(x, 0)² (D. So et al., "Primer", 2021)."""


@dataclass(frozen=True)
class SoftCap(_Activation):
    """cap tanh(x / cap): x near 0, and never beyond ±cap. As the last layer it bounds logits."""

    cap: Positive


@dataclass(frozen=True)
class LeakyReLU(_Activation):
    """x where x > 0, negative_slope x elsewhere."""

    negative_slope: Number = 0.01


@dataclass(frozen=True)
class ELU(_Activation):
    """x where x > 0, alpha (exp(x) - 1) elsewhere (Clevert et al. 2016)."""

    alpha: Number = 1.0


@dataclass(frozen=True)
class GELU(_Activation):
    """x Φ(x), where Φ is the normal distribution function, or its tanh approximation (Hendrycks and Gimpel 2016)."""

    approximate: Literal["none", "tanh"] = "none"


@dataclass(frozen=True)
class SiLU(_Activation):
    """x sigmoid(x)."""


@dataclass(frozen=True)
class Hardswish(_Activation):
    """x clip(x + 3, 0, 6) / 6 (Howard et al. 2019)."""

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return x * (ops.clip(x + 3.0, 0.0, 6.0) * (1 / 6)), state


@dataclass(frozen=True)
class PReLU(_Activation):
    """x where x > 0, weight x elsewhere (He et al. 2015); one weight, or one for each channel.

    `init_value` is the option `init` of torch.nn.PReLU.
    """

    num_parameters: Size = 1
    _: KW_ONLY
    init_value: Number = 0.25

    def output_shape(self, shape: Shape) -> Shape:
        if self.num_parameters != 1 and self.num_parameters != shape[0]:
            raise ShapeError(
                f"prelu: num_parameters is {self.num_parameters}, expected 1 or the number of channels of {shape}"
            )
        return shape

    def by_token(self, shape: Shape) -> bool:
        return self.num_parameters == 1

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"weight": (self.num_parameters,)}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        return {"weight": array(np.full(self.num_parameters, self.init_value, dtype))}, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        slope = ops.reshape(params["weight"], (-1, *(1,) * (x.ndim - 2)))
        return ops.where(ops.less(0.0, x), x, x * slope), state


@dataclass(frozen=True)
class Scale(_Elementwise):
    """The input times `factor`. With factor 1 a branch passes its input on."""

    factor: Number

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return x if self.factor == 1 else x * self.factor, state


@dataclass(frozen=True)
class Tanh(_Activation):
    """tanh(x)."""


@dataclass(frozen=True)
class Sigmoid(_Activation):
    """1 / (1 + exp(-x))."""


@dataclass(frozen=True)
class Softplus(_Activation):
    """log(1 + exp(x))."""


@dataclass(frozen=True)
class _AlongAxis(_Activation):
    """An activation along the axis `dim`, which is counted as in PyTorch: axis 0 is the batch."""

    dim: Axis = -1

    def output_shape(self, shape: Shape) -> Shape:
        axis_of(self, self.dim, shape)
        return shape

    def by_token(self, shape: Shape) -> bool:
        return axis_of(self, self.dim, shape) > 0


@dataclass(frozen=True)
class Softmax(_AlongAxis):
    """exp(x) / Σ exp(x) along the axis `dim`; axis 0 is the batch."""


@dataclass(frozen=True)
class LogSoftmax(_AlongAxis):
    """x - log Σ exp(x) along the axis `dim`; axis 0 is the batch."""


@dataclass(frozen=True)
class Dropout(_Elementwise):
    """In training, 0 with probability p and x / (1 - p) otherwise; in evaluation, x."""

    p: Fraction = 0.5

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        if self.p == 0 or not mode.is_training(self):
            return x, state
        if mode.rng is None:
            raise AdtrainError(f"{self.kind()}: found no rng in training, expected Mode(training=True, rng=...)")
        return self._dropped(x, mode.rng, mode.stream), state

    def _dropped(self, x: Value, rng: Value, stream: int) -> Value:
        return ops.dropout(x, self.p, rng, stream=stream)


@dataclass(frozen=True)
class Dropout2d(Dropout):
    """In training, a channel of an image is 0 with probability p and x / (1 - p) otherwise (Tompson et al. 2015)."""

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, IMAGE_AXES)
        return shape

    def _dropped(self, x: Value, rng: Value, stream: int) -> Value:
        ones = ops.ones((*x.shape[:2], 1, 1), x.dtype, x.device)
        return x * ops.dropout(ones, self.p, rng, stream=stream)


@dataclass(frozen=True)
class Flatten(Module):
    """Each sample flattened to one axis."""

    def output_shape(self, shape: Shape) -> Shape:
        return (prod(shape),)

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.reshape(x, (x.shape[0], prod(x.shape[1:]))), state


@dataclass(frozen=True)
class Reshape(Module):
    """Each sample reshaped to `shape`; one axis may be -1 and is inferred."""

    shape: OpenShape

    def __post_init__(self) -> None:
        if self.shape.count(-1) > 1:
            raise OptionError(f"reshape: shape is {self.shape}, expected {words_in_python(OpenShape)}")

    def output_shape(self, shape: Shape) -> Shape:
        known = prod(n for n in self.shape if n != -1)
        fits = prod(shape) % known == 0 if -1 in self.shape else prod(shape) == known
        if not fits:
            raise ShapeError(f"reshape: shape {self.shape} has {known} elements, the input {prod(shape)}: {shape}")
        return tuple(prod(shape) // known if n == -1 else n for n in self.shape)

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.reshape(x, (x.shape[0], *self.output_shape(x.shape[1:]))), state


@dataclass(frozen=True)
class Select(Module):
    """The features or channels of each sample at these indices: (C, ...) -> (len(indices), ...)."""

    indices: Indices

    def output_shape(self, shape: Shape) -> Shape:
        if not shape or max(self.indices) >= shape[0]:
            raise ShapeError(f"select: index {max(self.indices)} is out of range for the input {shape}")
        return (len(self.indices), *shape[1:])

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.take(x, np.array(self.indices), axis=1), state
