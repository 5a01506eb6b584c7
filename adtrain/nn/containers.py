"""Modules made of modules: sequential, residual and parallel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import shown
from adtrain.core.trace import scope
from adtrain.nn.linear import Embedding, Linear
from adtrain.nn.module import LayerError, Mode, Module, Params, Shape, State, size_text

LIMIT = 2**31
"""Kernels count the elements of an image in 32 bits; no layer makes a sample larger than that."""


@contextmanager
def _prefix_errors(name: str) -> Iterator[None]:
    """Put the child's name in front of the path of shape errors raised in the block."""
    try:
        yield
    except LayerError as error:
        raise LayerError((name, *error.path), error.reason) from None
    except ShapeError as error:
        raise LayerError((name,), str(error)) from None


class Container(Module):
    """A module of named children. Its trees have one subtree for each child that has arrays."""

    @abstractmethod
    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        """Yield (name, child, shape of the child's input) for input samples of `shape`."""

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {
            f"{name}.{key}": size
            for name, child, child_shape in self.children(shape)
            for key, size in child.parameter_shapes(child_shape).items()
        }

    def new_cache(self, shape: Shape, batch: int, dtype: np.dtype[Any]) -> State | None:
        """Those of the children, for a container whose own arithmetic is `by_token`."""
        if not self.by_token(shape):
            return None
        found: State = {}
        for name, child, child_shape in self.children(shape):
            cache = child.new_cache(child_shape, batch, dtype)
            if cache is None:
                return None
            if cache:
                found[name] = cache
        return found

    def at_input(self, shape: Shape) -> Iterator[tuple[str, Module]]:
        """Yield (name, child) for the children whose input is that of the container."""
        for name, child, _ in self.children(shape):
            yield name, child

    def needs_images(self, shape: Shape) -> bool:
        return any(child.needs_images(shape) for _, child in self.at_input(shape))

    def input_weights(self, shape: Shape, images: np.ndarray) -> Params:
        weights = {name: child.input_weights(shape, images) for name, child in self.at_input(shape)}
        return {name: found for name, found in weights.items() if found}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        params: Params = {}
        state: State = {}
        for name, child, child_shape in self.children(shape):
            child_params, child_state = child.new_arrays(child_shape, rng, dtype)
            if child_params:
                params[name] = child_params
            if child_state:
                state[name] = child_state
        return params, state


def run_child(
    name: str, scope_name: str, child: Module, params: Params, state: State, x: Value, mode: Mode
) -> tuple[Value, State]:
    """The child's output on its subtrees of `params` and `state`, and {name: its new state}, or {} if it has none."""
    with scope(scope_name):
        y, new = child.forward(params.get(name, {}), state.get(name, {}), x, mode.at(name))
    return y, {name: new} if new else {}


def child_output_shape(name: str, child: Module, shape: Shape) -> Shape:
    with _prefix_errors(name):
        found = child.output_shape(shape)
        if prod(found) >= LIMIT and not isinstance(child, Container):
            raise ShapeError(f"{child.kind()}: found the output {size_text(found)}, expected fewer than 2^31 numbers")
        return found


@dataclass(frozen=True, init=False)
class Sequential(Container):
    """One layer after the other; the children are "0", "1", ... as in torch.nn.Sequential.

    A linear layer with `tied` takes the weight of the embedding among the layers.
    """

    layers: tuple[Module, ...]

    def __init__(self, *layers: Module) -> None:
        object.__setattr__(self, "layers", _checked_modules(self, "layers", layers))

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.layers))})"

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        for i, layer in enumerate(self.layers):
            output_shape = self._child_output_shape(i, layer, shape)
            yield str(i), layer, shape
            shape = output_shape

    def by_token(self, shape: Shape) -> bool:
        return True

    def at_input(self, shape: Shape) -> Iterator[tuple[str, Module]]:
        if self.layers:
            yield "0", self.layers[0]

    def output_shape(self, shape: Shape) -> Shape:
        for i, layer in enumerate(self.layers):
            output_shape = self._child_output_shape(i, layer, shape)
            if i and layer.needs_images(shape):
                reason = f"found weight_init whitening in layer {i}, expected it in the first one"
                raise LayerError((str(i),), f"{layer.kind()}: {reason}: it takes the network's input")
            shape = output_shape
        return shape

    def _child_output_shape(self, i: int, layer: Module, shape: Shape) -> Shape:
        found = child_output_shape(str(i), layer, shape)
        if isinstance(layer, Linear) and layer.tied:
            with _prefix_errors(str(i)):
                embedding = self.layers[self.shared_embedding()]
                weight, expected = embedding.parameter_shapes(())["weight"], (layer.out_features, shape[-1])
                if weight != expected:
                    raise ShapeError(f"linear: tied: the embedding's weight is {weight}, expected {expected}")
        return found

    def shared_embedding(self) -> int:
        """The position of the only embedding. Raises ShapeError where there are none or several."""
        found = [i for i, layer in enumerate(self.layers) if isinstance(layer, Embedding)]
        if len(found) != 1:
            raise ShapeError(f"linear: tied: found {len(found)} embeddings in the list of layers, expected one")
        return found[0]

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        new: State = {}
        for i, layer in enumerate(self.layers):
            if isinstance(layer, Linear) and layer.tied:
                shared = params[str(self.shared_embedding())]["weight"]
                params = {**params, str(i): {"weight": shared, **params.get(str(i), {})}}
            x, layer_state = run_child(str(i), f"{i}.{layer.kind()}", layer, params, state, x, mode)
            new |= layer_state
        return x, new


@dataclass(frozen=True)
class Residual(Container):
    """body(x) + shortcut(x) (He et al. 2016); without a shortcut, body(x) + x. Children: "body" and "shortcut"."""

    body: Module
    _: KW_ONLY
    shortcut: Module | None = None

    def by_token(self, shape: Shape) -> bool:
        return True

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        yield "body", self.body, shape
        if self.shortcut is not None:
            yield "shortcut", self.shortcut, shape

    def output_shape(self, shape: Shape) -> Shape:
        body = child_output_shape("body", self.body, shape)
        if self.shortcut is None:
            if body != shape:
                raise ShapeError(
                    f"residual: the body gives {body}, its input is {shape}: add a shortcut that gives {body}"
                )
        elif (shortcut := child_output_shape("shortcut", self.shortcut, shape)) != body:
            raise ShapeError(f"residual: the body gives {body}, the shortcut {shortcut}")
        return body

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        y, new = run_child("body", "body", self.body, params, state, x, mode)
        if self.shortcut is not None:
            x, shortcut_state = run_child("shortcut", "shortcut", self.shortcut, params, state, x, mode)
            new |= shortcut_state
        return ops.add(y, x), new


@dataclass(frozen=True, init=False)
class Branches(Container):
    """Modules on the same input, named "0", "1", ...; subclasses join their outputs."""

    branches: tuple[Module, ...]

    def __init__(self, *branches: Module) -> None:
        object.__setattr__(self, "branches", _checked_modules(self, "branches", branches))
        if not self.branches:
            raise OptionError(f"{self.kind()}: branches is empty, expected at least one module")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.branches))})"

    @abstractmethod
    def joined_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of the joined output. Raises ShapeError if the branches' shapes cannot be joined."""

    @abstractmethod
    def join(self, outputs: Sequence[Value]) -> Value: ...

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        for i, branch in enumerate(self.branches):
            yield str(i), branch, shape

    def output_shape(self, shape: Shape) -> Shape:
        return self.joined_shape([child_output_shape(str(i), branch, shape) for i, branch in enumerate(self.branches)])

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        outputs: list[Value] = []
        new: State = {}
        for i, branch in enumerate(self.branches):
            y, branch_state = run_child(str(i), f"{i}.{branch.kind()}", branch, params, state, x, mode)
            outputs.append(y)
            new |= branch_state
        return self.join(outputs), new


@dataclass(frozen=True, init=False, repr=False)
class Concat(Branches):
    """The branches' outputs, concatenated along the first axis of a sample (channels)."""

    def joined_shape(self, shapes: Sequence[Shape]) -> Shape:
        first = shapes[0]
        for i, other in enumerate(shapes):
            if not first or len(other) != len(first) or other[1:] != first[1:]:
                raise ShapeError(
                    f"concat: the branches must agree after the first axis, branch 0 gives {first}, branch {i} {other}"
                )
        return (sum(other[0] for other in shapes), *first[1:])

    def join(self, outputs: Sequence[Value]) -> Value:
        return ops.concatenate(outputs, axis=1)


@dataclass(frozen=True, init=False, repr=False)
class Add(Branches):
    """The sum of the branches' outputs."""

    def joined_shape(self, shapes: Sequence[Shape]) -> Shape:
        for i, other in enumerate(shapes):
            if other != shapes[0]:
                raise ShapeError(f"add: the branches must agree, branch 0 gives {shapes[0]}, branch {i} {other}")
        return shapes[0]

    def by_token(self, shape: Shape) -> bool:
        return True

    def join(self, outputs: Sequence[Value]) -> Value:
        return reduce(ops.add, outputs)


@dataclass(frozen=True, init=False, repr=False)
class Multiply(Branches):
    """The product of the branches' outputs. An axis of length 1 is repeated, so that a gate can scale channels."""

    def joined_shape(self, shapes: Sequence[Shape]) -> Shape:
        joined = shapes[0]
        for i, other in enumerate(shapes):
            axes = list(zip(joined, other, strict=False))
            if len(other) != len(joined) or any(a != b and 1 not in (a, b) for a, b in axes):
                raise ShapeError(
                    f"multiply: the branches must agree or have axes of length 1, branch 0 gives {shapes[0]}, "
                    f"branch {i} {other}"
                )
            joined = tuple(max(a, b) for a, b in axes)
        return joined

    def by_token(self, shape: Shape) -> bool:
        return True

    def join(self, outputs: Sequence[Value]) -> Value:
        return reduce(ops.mul, outputs)


def _checked_modules(container: Container, name: str, modules: tuple[Module, ...]) -> tuple[Module, ...]:
    """``modules``; OptionError unless each is a module."""
    for module in modules:
        if isinstance(module, (list, tuple)):
            advice = f"; write nn.{type(container).__name__}(*{name})"
        else:
            advice = f"; write {module.__name__}()" if isinstance(module, type) else ""
        if not isinstance(module, Module):
            raise OptionError(f"{container.kind()}: {name} holds {shown(module)}, expected modules{advice}")
    return modules


@dataclass(frozen=True, init=False, repr=False)
class WithCoefficients(Sequential):
    """A Sequential with further parameters of shape (), "coefficients.k": numbers that no layer reads.

    They are those of equations that are trained with the network.
    """

    layers: tuple[Module, ...]
    coefficients: tuple[tuple[str, float], ...]

    def __init__(self, *layers: Module, coefficients: tuple[tuple[str, float], ...]) -> None:
        super().__init__(*layers)
        object.__setattr__(self, "coefficients", coefficients)

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return super().parameter_shapes(shape) | {f"coefficients.{name}": () for name, _ in self.coefficients}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        params, state = super().new_arrays(shape, rng, dtype)
        return {**params, "coefficients": {name: array(np.array(x, dtype)) for name, x in self.coefficients}}, state
