"""The base class of layers: an immutable description. Its arrays are in separate trees."""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import ShapeError

Shape = tuple[int, ...]
"""The shape of one sample, without the batch axis."""
Params = dict[str, Any]
"""A tree of the arrays that the optimizer trains."""
State = dict[str, Any]
"""A tree of the arrays that a forward pass updates: running statistics."""


@dataclass(frozen=True, eq=False)
class Mode:
    """How a model is run: in training or evaluation, with which random state, and which of its layers is running.

    `rng` is the random state, `ops.rng_state(seed, step)`. `path` holds the child names from the model to the layer
    that is running; it gives each dropout layer a random stream of its own.
    """

    training: bool
    rng: Value | None = None
    path: tuple[str, ...] = ()

    def at(self, name: str) -> Mode:
        """The mode for the child `name` of the module that is running."""
        return replace(self, path=(*self.path, name))

    @property
    def stream(self) -> int:
        """The number of the random stream of the layer at `path`: below 2**32, the same in every process."""
        return zlib.crc32(".".join(self.path).encode())


class LayerError(ShapeError):
    """A layer inside a container does not fit its input. `path` holds the child names down to it, `reason` says why."""

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        super().__init__(f"layer {'.'.join(path)}: {reason}")
        self.path = path
        self.reason = reason


class Module(ABC):
    """A layer. Subclasses are frozen dataclasses; their fields are the layer's options, with PyTorch's names."""

    @classmethod
    def kind(cls) -> str:
        """The layer's name in a config and in scopes: `ConvTranspose2d` is "conv_transpose2d"."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def output_shape(self, shape: Shape) -> Shape:
        """The shape of one output sample for an input sample of `shape`. Raises ShapeError if `shape` does not fit."""

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Name and shape of each parameter for input samples of `shape`, which must fit; nothing is allocated."""
        return {}

    def init(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        """New parameters and state, as trees of CPU arrays of `dtype`, for input samples of `shape`.

        Numbers are drawn in float64 and rounded to `dtype`, so both precisions start from the same network.
        Raises ShapeError if `shape` does not fit.
        """
        self.output_shape(shape)
        return {}, {}

    @abstractmethod
    def __call__(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        """The output for a batch `x`, shape (N, *shape), and the new state. Pure: the arguments are not changed."""
