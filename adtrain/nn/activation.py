"""Activations and dropout: layers without parameters that keep the shape."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.errors import AdtrainError
from adtrain.nn import fields
from adtrain.nn.module import Mode, Module, Params, Shape, State
from adtrain.option_types import Axis, Fraction, Number


@dataclass(frozen=True)
class _Activation(Module):
    """The operation of the same name in `ops`. The layer's options are its arguments after `x`."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return getattr(ops, self.kind())(x, *astuple(self)), state


@dataclass(frozen=True)
class ReLU(_Activation):
    """max(x, 0)."""


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
        fields.axis_of(self, self.dim, shape)
        return shape


@dataclass(frozen=True)
class Softmax(_AlongAxis):
    """exp(x) / Σ exp(x) along the axis `dim`; axis 0 is the batch."""


@dataclass(frozen=True)
class LogSoftmax(_AlongAxis):
    """x - log Σ exp(x) along the axis `dim`; axis 0 is the batch."""


@dataclass(frozen=True)
class Dropout(Module):
    """In training, 0 with probability p and x / (1 - p) otherwise; in evaluation, x."""

    p: Fraction = 0.5

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        if self.p == 0 or not mode.is_training(self):
            return x, state
        if mode.rng is None:
            raise AdtrainError("dropout: found no rng in training, expected Mode(training=True, rng=...)")
        return ops.dropout(x, self.p, mode.rng, stream=mode.stream), state
