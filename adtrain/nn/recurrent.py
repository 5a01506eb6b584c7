"""Recurrent layers: rnn, lstm, gru, of several layers and in one or both directions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from math import sqrt
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import Bounds
from adtrain.nn.activation import Dropout
from adtrain.nn.module import Mode, Module, Params, Shape, State, check_inferred
from adtrain.option_types import Fraction, Size

Layers = Annotated[int, Bounds(ge=1, le=1000)]
"""A number of layers."""


@dataclass(frozen=True)
class _Recurrent(Module):
    """Layers l0, l1, ... over the steps of a sample; parameters have PyTorch's names and layouts.

    Each layer gets the hidden states of the one before, in training with dropout. With `bidirectional` it also runs
    from the last step to the first, and both hidden states of a step are concatenated.
    """

    left_out = ("input_size", int, "input_size is inferred from the input")
    gates: ClassVar[int]
    hidden_size: Size
    _: KW_ONLY
    num_layers: Layers = 1
    bias: bool = True
    dropout: Fraction = 0.0
    bidirectional: bool = False
    output: Literal["last", "all"] = "last"
    input_size: Size | None = None

    def __post_init__(self) -> None:
        if self.dropout and self.num_layers == 1:
            raise OptionError(
                f"{self.kind()}: dropout is {self.dropout} between layers, and num_layers is 1; "
                "write a dropout layer after this one"
            )

    @property
    def width(self) -> int:
        """Features of the output at a step."""
        return self.hidden_size * (2 if self.bidirectional else 1)

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2:
            rows = f"; write reshape: [{shape[0] * shape[1]}, {shape[2]}] before it" if len(shape) == 3 else ""
            raise ShapeError(f"{self.kind()}: expected an input of shape (length, features), found {shape}{rows}")
        check_inferred(self, "input_size", shape[1], shape)
        return (shape[0], self.width) if self.output == "all" else (self.width,)

    def names(self, layer: int) -> Iterator[list[str]]:
        """For each direction of a layer the names of its arrays: weight_ih, weight_hh, bias_ih, bias_hh."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self.bias else 2]
        for suffix in ("", "_reverse")[: 2 if self.bidirectional else 1]:
            yield [f"{kind}_l{layer}{suffix}" for kind in kinds]

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        rows = self.gates * self.hidden_size
        for layer in range(self.num_layers):
            weight_ih, weight_hh = (rows, self.width if layer else shape[1]), (rows, self.hidden_size)
            for names in self.names(layer):
                found |= dict(zip(names, (weight_ih, weight_hh, (rows,), (rows,)), strict=False))
        return found

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        """U(-b, b) with b = 1 / √hidden_size, as PyTorch."""
        bound = 1 / sqrt(self.hidden_size)
        sizes = self.parameter_shapes(shape)
        return {name: array(rng.uniform(-bound, bound, size).astype(dtype)) for name, size in sizes.items()}, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        last: list[Value] = []
        for layer in range(self.num_layers):
            if layer:
                x, _ = Dropout(self.dropout).forward({}, {}, x, mode.at(f"dropout_l{layer - 1}"))
            directions = [
                self.run(x, [params[name] for name in names], reverse)
                for reverse, names in zip((False, True), self.names(layer), strict=False)
            ]
            steps, last = [each[0] for each in directions], [each[1] for each in directions]
            x = _joined(steps)
        return (x if self.output == "all" else _joined(last)), state

    @abstractmethod
    def run(self, x: Value, arrays: list[Value], reverse: bool) -> tuple[Value, ...]:
        """The hidden states of one layer in one direction at all steps, and the last one."""


@dataclass(frozen=True)
class RNN(_Recurrent):
    """h' = f(W_ih x + b_ih + W_hh h + b_hh) with f = tanh or relu (Elman 1990), over steps: (length, features).

    The output is the last hidden state of each direction, (hidden_size,), or with `output: all` those of all steps,
    (length, hidden_size). With `bidirectional` both directions are concatenated.
    """

    gates = 1
    _: KW_ONLY
    nonlinearity: Literal["tanh", "relu"] = "tanh"

    def run(self, x: Value, arrays: list[Value], reverse: bool) -> tuple[Value, ...]:
        return ops.rnn(x, *arrays, nonlinearity=self.nonlinearity, reverse=reverse)


@dataclass(frozen=True)
class LSTM(_Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997; Gers et al. 2000); shapes and options as of `rnn`."""

    gates = 4

    def run(self, x: Value, arrays: list[Value], reverse: bool) -> tuple[Value, ...]:
        return ops.lstm(x, *arrays, reverse=reverse)


@dataclass(frozen=True)
class GRU(_Recurrent):
    """Gated recurrent unit (Cho et al. 2014); shapes and options as of `rnn`."""

    gates = 3

    def run(self, x: Value, arrays: list[Value], reverse: bool) -> tuple[Value, ...]:
        return ops.gru(x, *arrays, reverse=reverse)


def _joined(directions: list[Value]) -> Value:
    return directions[0] if len(directions) == 1 else ops.concatenate(directions, -1)
