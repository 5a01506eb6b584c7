"""The base class of layers: an immutable description. Its arrays are in separate trees.

Also: checks of the shapes of inputs.
"""

from __future__ import annotations

import re
import zlib
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError, DTypeError, OptionError, ShapeError
from adtrain.core.operators import OF_PYTORCH_MODULES
from adtrain.core.options import CheckedArguments, is_integer, shown
from adtrain.core.types import dtype_of

Shape = tuple[int, ...]
"""The shape of one sample, without the batch axis."""
Params = dict[str, Any]
"""A tree of the arrays that the optimizer trains."""
State = dict[str, Any]
"""A tree of the arrays that are not trained, such as running statistics. A forward pass may update them."""
Pair = int | tuple[int, int]
IMAGE_AXES, TOKEN_AXES = ("channels", "height", "width"), ("tokens", "width")
"""The axes of a sample."""


@dataclass(frozen=True, eq=False)
class Token:
    """A token of each sequence. All layers share what follows from its position.

    Attributes:
        position: integers (batch,).
        length: the number of tokens of a whole sequence.
        start: the position at which the token's document begins, integers (batch,); None where it is 0.
    """

    position: Value
    length: int
    start: Value | None = None

    def row_of(self, table: Value) -> Value:
        """The row at the position, (batch, 1, ...), of a table (length, ...)."""
        return ops.expand_dims(ops.embedding(self.position, table), 1)

    @cached_property
    def distance(self) -> Value:
        """The position minus each position of a sequence: integers (batch, 1, length)."""
        places = ops.arange(self.length, device=self.position.device)
        return ops.reshape(self.position, (-1, 1, 1)) - places

    @cached_property
    def seen(self) -> Value:
        """Whether each position is in the token's document, and not after the token: bool (batch, 1, length)."""
        seen = ops.greater_equal(self.distance, 0)
        if self.start is None:
            return seen
        return seen & ops.less_equal(self.distance, ops.reshape(self.position - self.start, (-1, 1, 1)))


@dataclass(frozen=True, eq=False)
class Mode:
    """How a model is run: in training or evaluation, with which random state, and which of its layers is running.

    `training` is None for `model(params, x)`, which says neither; a layer that differs in the two refuses it.
    `rng` is the random state, `ops.rng_state(seed, step)`. `path` holds the child names from the model to the layer
    that is running; it gives each dropout layer a random stream of its own. If the input is a shard of a
    batch, `shards` holds the number of samples in each shard (`ops.gather_shards`); otherwise it is empty.

    `starts`, int32 (batch, tokens), has for each token the position at which its document begins, where documents that
    share a sequence are separate: attention stays within a document, and positions count from its beginning.

    `token` says that the input is one token of each sequence, (batch, 1, ...). What layers keep of the tokens before it
    is in the state: see `Module.new_cache`.
    """

    training: bool | None
    rng: Value | None = None
    path: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    starts: Value | None = None
    token: Token | None = None

    def at(self, name: str) -> Mode:
        """The mode for the child `name` of the module that is running."""
        return replace(self, path=(*self.path, name))

    def is_training(self, layer: Module) -> bool:
        """`training`, for a layer that differs in training and evaluation. Raises AdtrainError if it is None."""
        if self.training is None:
            raise AdtrainError(
                f"{layer.kind()}: model(params, x) does not say whether the model is in training; write "
                "model.forward(params, state, x, nn.Mode(training=False))"
            )
        return self.training

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


class Module(CheckedArguments):
    """A layer. Subclasses are frozen dataclasses; their fields are the layer's options, with PyTorch's names.

    A subclass defines `output_shape` and `forward`, and for parameters also `parameter_shapes` and `new_arrays`.
    """

    instead = OF_PYTORCH_MODULES

    @classmethod
    def kind(cls) -> str:
        """The name in a config and in scopes: `ConvTranspose2d` is "conv_transpose2d", `ReLU` is "relu"."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])(?!LU)", "_", cls.__name__).lower()

    @abstractmethod
    def output_shape(self, shape: Shape) -> Shape:
        """The shape of one output sample for an input sample of `shape`. Raises ShapeError if `shape` does not fit."""

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Name and shape of each parameter for input samples of `shape`, which must fit; nothing is allocated."""
        return {}

    def by_token(self, shape: Shape) -> bool:
        """Whether a token of the output depends on the same token of the input alone: axis 0 of `shape` are tokens."""
        return False

    def new_cache(self, shape: Shape, batch: int, dtype: np.dtype[Any]) -> State | None:
        """Arrays of the state that keep, for each sequence of a batch, what later tokens need of earlier ones.

        With them the layer computes one token after the other (`Mode.token`). It is None where an output can depend
        on later tokens, or the layer cannot keep what it needs.
        """
        return {} if self.by_token(shape) else None

    def needs_images(self, shape: Shape) -> bool:
        """Whether initial weights are computed from inputs of the network: those of `whitening`."""
        return False

    def input_weights(self, shape: Shape, images: np.ndarray) -> Params:
        """The weights that are computed from inputs (N, *shape), as the part of the tree of `init` that has them."""
        return {}

    def init(
        self,
        shape: Shape | int,
        rng: np.random.Generator | int = 0,
        dtype: DTypeLike = np.float32,
        images: np.ndarray | None = None,
    ) -> tuple[Params, State]:
        """New parameters and state, as trees of CPU arrays, for input samples of `shape`.

        Numbers are drawn in float64 and rounded to `dtype`, so both precisions start from the same network.

        Args:
            shape: of one sample, without the batch axis; an integer n is (n,).
            rng: the generator of the initial values, or its seed.
            dtype: float32 or float64.
            images: inputs (N, *shape), for a layer with `weight_init="whitening"`.

        Raises:
            ShapeError: `shape` or `images` do not fit. OptionError: `rng` is neither a generator nor a seed, or a layer
            needs `images`.
            DTypeError: `dtype` is not of floating point.
        """
        sizes: Any = (shape,) if is_integer(shape, 0) else shape
        if not isinstance(sizes, (tuple, list)) or not all(is_integer(n, 0) for n in sizes):
            raise ShapeError(f"{self.kind()}: shape is {shown(shape)}, expected the sizes of one sample, as (784,)")
        if not isinstance(rng, np.random.Generator):
            if not is_integer(rng, 0):
                raise OptionError(f"{self.kind()}: rng is {shown(rng)}, expected a seed or a numpy.random.Generator")
            rng = np.random.default_rng(rng)
        elements = dtype_of(self.kind(), dtype)
        if elements.kind != "f":
            raise DTypeError(f"{self.kind()}: dtype is {elements}, expected float32 or float64")
        fitting = tuple(int(n) for n in sizes)
        self.output_shape(fitting)
        params, state = self.new_arrays(fitting, rng, elements)
        if self.needs_images(fitting):
            if images is None:
                raise OptionError(f"{self.kind()}: weight_init whitening needs images: write init(shape, images=...)")
            if images.shape[1:] != fitting or not len(images):
                found = shown(images.shape)
                raise ShapeError(f"{self.kind()}: images has the shape {found}, expected (N, {str(fitting)[1:]}")
            params = with_weights(params, self.input_weights(fitting, images))
        return params, state

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        """The trees of `init`, for a `shape` that fits."""
        return {}, {}

    @abstractmethod
    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        """The output for a batch `x`, shape (N, *shape), and the new state. Pure: the arguments are not changed."""

    def __call__(self, params: Params, x: Value | np.ndarray) -> Value:
        """The output for a batch `x`, shape (N, *shape), of a model that is the same in training and evaluation.

        Raises AdtrainError if the model has dropout or batch normalisation: these need `forward`.
        """
        return self.forward(params, {}, x if isinstance(x, Value) else array(x), Mode(training=None))[0]


def with_weights(params: Params, weights: Params) -> Params:
    """`params` with the numbers of `weights`, a part of the same tree, in their types."""
    found = dict(params)
    for name, x in weights.items():
        old = params[name]
        found[name] = with_weights(old, x) if isinstance(x, dict) else array(x.astype(old.dtype))
    return found


def pair(value: Pair) -> tuple[int, int]:
    """(height, width); an integer is used for both."""
    return value if isinstance(value, tuple) else (value, value)


def size_text(size: tuple[int, ...]) -> str:
    """The size as text: "5x5"."""
    return "x".join(map(str, size))


def axis_of(layer: Module, dim: int, shape: Shape) -> int:
    """The axis of a sample, from 0, for the axis `dim` of a batch. Raises ShapeError if it is out of range."""
    axes = len(shape) + 1
    if not -axes < dim < axes:
        raise ShapeError(f"{layer.kind()}: dim is {dim}, the input has {axes} axes with the batch axis: {shape}")
    return dim % axes - 1


def check_ndim(layer: Module, shape: Shape, axes: tuple[str, ...]) -> None:
    """Raise ShapeError unless `shape` has one size for each of the named axes."""
    if len(shape) != len(axes):
        raise ShapeError(f"{layer.kind()}: expected an input of shape ({', '.join(axes)}), found {shape}")


def check_features(layer: Module, shape: Shape) -> None:
    """Raise ShapeError if `shape` has no last axis, of features."""
    if not shape:
        raise ShapeError(f"{layer.kind()}: expected an input of shape (..., features), found {shape}")


def check_inferred(layer: Module, name: str, size: int, shape: Shape) -> None:
    """Raise ShapeError if the optional field `name` is set and differs from `size`, which the input's shape gives."""
    value = getattr(layer, name)
    if value is not None and value != size:
        hint = "; add flatten before it" if len(shape) > 1 and value == prod(shape) else ""
        reason = f"{name} is {value}, expected {size} for the input {shape}"
        raise ShapeError(f"{layer.kind()}: {reason}{hint}")
