"""Layers without parameters that keep the shape: activations and dropout."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.errors import AdtrainError, OptionError, ShapeError
from adtrain.nn import fields
from adtrain.nn.module import Mode, Module, Params, Shape, State


class _Activation(Module):
    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def __call__(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return self.apply(x), state

    @abstractmethod
    def apply(self, x: Value) -> Value:
        """The activation of every element."""


@dataclass(frozen=True)
class Relu(_Activation):
    """max(x, 0)."""

    def apply(self, x: Value) -> Value:
        return ops.relu(x)


@dataclass(frozen=True)
class LeakyRelu(_Activation):
    """x where positive, negative_slope x elsewhere."""

    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        fields.check_number(self, "negative_slope")

    def apply(self, x: Value) -> Value:
        return ops.leaky_relu(x, self.negative_slope)


@dataclass(frozen=True)
class Elu(_Activation):
    """x where positive, alpha (exp(x) - 1) elsewhere (Clevert et al. 2016)."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        fields.check_number(self, "alpha")

    def apply(self, x: Value) -> Value:
        return ops.elu(x, self.alpha)


@dataclass(frozen=True)
class Gelu(_Activation):
    """x Φ(x) with Φ the normal distribution function, or its tanh approximation (Hendrycks and Gimpel 2016)."""

    approximate: Literal["none", "tanh"] = "none"

    def __post_init__(self) -> None:
        fields.check_choice(self, "approximate", ("none", "tanh"))

    def apply(self, x: Value) -> Value:
        return ops.gelu(x, self.approximate)


@dataclass(frozen=True)
class Silu(_Activation):
    """x sigmoid(x)."""

    def apply(self, x: Value) -> Value:
        return ops.silu(x)


@dataclass(frozen=True)
class Tanh(_Activation):
    """tanh(x)."""

    def apply(self, x: Value) -> Value:
        return ops.tanh(x)


@dataclass(frozen=True)
class Sigmoid(_Activation):
    """1 / (1 + exp(-x))."""

    def apply(self, x: Value) -> Value:
        return ops.sigmoid(x)


@dataclass(frozen=True)
class Softplus(_Activation):
    """log(1 + exp(x))."""

    def apply(self, x: Value) -> Value:
        return ops.softplus(x)


@dataclass(frozen=True)
class _OverAxis(_Activation):
    dim: int = -1

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or self.dim == 0:
            raise OptionError(f"{self.kind()}: dim is {self.dim!r}, expected an axis other than 0, the batch's")

    def output_shape(self, shape: Shape) -> Shape:
        axes = len(shape) + 1
        if not -axes < self.dim < axes:
            raise ShapeError(f"{self.kind()}: dim is {self.dim}, the input has {axes} axes with the batch's: {shape}")
        return shape


@dataclass(frozen=True)
class Softmax(_OverAxis):
    """exp(x) / Σ exp(x) along the axis `dim`, counted as in PyTorch: the batch's axis is 0."""

    def apply(self, x: Value) -> Value:
        return ops.softmax(x, axis=self.dim)


@dataclass(frozen=True)
class LogSoftmax(_OverAxis):
    """x - log Σ exp(x) along the axis `dim`, counted as in PyTorch: the batch's axis is 0."""

    def apply(self, x: Value) -> Value:
        return ops.log_softmax(x, axis=self.dim)


@dataclass(frozen=True)
class Dropout(Module):
    """In training, zero with probability p and 1 / (1 - p) times x otherwise; x when evaluating."""

    p: float = 0.5

    def __post_init__(self) -> None:
        fields.check_number(self, "p", low=0, below=1)

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def __call__(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        if not mode.training or self.p == 0:
            return x, state
        if mode.rng is None:
            raise AdtrainError("dropout: training needs random numbers: Mode(training=True, rng=...)")
        return ops.dropout(x, self.p, mode.rng, stream=mode.stream), state
