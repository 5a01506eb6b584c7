"""Layers that move elements and compute nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import words_in_python
from adtrain.nn.module import Mode, Module, Params, Shape, State
from adtrain.option_types import Indices, OpenShape


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
