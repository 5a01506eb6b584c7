"""Modules made of modules: one after the other, with a shortcut, or side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.scope import scope
from adtrain.nn.module import LayerError, Mode, Module, Params, Shape, State


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Shape errors raised inside say that they come from the child `name`."""
    try:
        yield
    except LayerError as error:
        raise LayerError((name, *error.path), error.reason) from None
    except ShapeError as error:
        raise LayerError((name,), str(error)) from None


class Container(Module):
    """A module of named children; its trees hold one subtree a child, for the children that have arrays."""

    @abstractmethod
    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        """Each child's name, the child, and the shape of its input for input samples of `shape`."""

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {
            f"{name}.{key}": size
            for name, child, inner in self.children(shape)
            for key, size in child.parameter_shapes(inner).items()
        }

    def init(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        self.output_shape(shape)
        params: Params = {}
        state: State = {}
        for name, child, inner in self.children(shape):
            child_params, child_state = child.init(inner, rng, dtype)
            if child_params:
                params[name] = child_params
            if child_state:
                state[name] = child_state
        return params, state


def _run(
    name: str, scope_name: str, child: Module, params: Params, state: State, x: Value, mode: Mode
) -> tuple[Value, State]:
    """Run a child on its subtrees; its new state comes back under its name, or nothing where it has none."""
    with scope(scope_name):
        y, new = child(params.get(name, {}), state.get(name, {}), x, mode.at(name))
    return y, {name: new} if new else {}


def _shape_through(name: str, child: Module, shape: Shape) -> Shape:
    with _naming(name):
        return child.output_shape(shape)


@dataclass(frozen=True)
class Sequential(Container):
    """One layer after the other, named "0", "1", ... as torch.nn.Sequential names them."""

    layers: Sequence[Module]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _modules(self, "layers", self.layers))

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        for i, layer in enumerate(self.layers):
            after = _shape_through(str(i), layer, shape)
            yield str(i), layer, shape
            shape = after

    def output_shape(self, shape: Shape) -> Shape:
        for i, layer in enumerate(self.layers):
            shape = _shape_through(str(i), layer, shape)
        return shape

    def __call__(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        new: State = {}
        for i, layer in enumerate(self.layers):
            x, changed = _run(str(i), f"{i}.{layer.kind()}", layer, params, state, x, mode)
            new |= changed
        return x, new


@dataclass(frozen=True)
class Residual(Container):
    """body(x) + shortcut(x) (He et al. 2016); without a shortcut, body(x) + x. Children: "body" and "shortcut"."""

    body: Module
    shortcut: Module | None = None

    def __post_init__(self) -> None:
        _modules(self, "body", [self.body])
        _modules(self, "shortcut", [] if self.shortcut is None else [self.shortcut])

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        yield "body", self.body, shape
        if self.shortcut is not None:
            yield "shortcut", self.shortcut, shape

    def output_shape(self, shape: Shape) -> Shape:
        body = _shape_through("body", self.body, shape)
        if self.shortcut is None:
            if body != shape:
                raise ShapeError(
                    f"residual: the body gives {body}, its input is {shape}: give a shortcut that projects"
                )
        elif (shortcut := _shape_through("shortcut", self.shortcut, shape)) != body:
            raise ShapeError(f"residual: the body gives {body}, the shortcut {shortcut}")
        return body

    def __call__(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        y, new = _run("body", "body", self.body, params, state, x, mode)
        if self.shortcut is not None:
            x, changed = _run("shortcut", "shortcut", self.shortcut, params, state, x, mode)
            new |= changed
        return ops.add(y, x), new


@dataclass(frozen=True)
class Branches(Container):
    """Modules side by side on one input, named "0", "1", ...; subclasses say how their outputs are joined."""

    branches: Sequence[Module]

    def __post_init__(self) -> None:
        object.__setattr__(self, "branches", _modules(self, "branches", self.branches))
        if not self.branches:
            raise OptionError(f"{self.kind()}: branches is empty, expected at least one module")

    @abstractmethod
    def joined_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of the joined output; ShapeError where the branches' do not fit together."""

    @abstractmethod
    def join(self, outputs: Sequence[Value]) -> Value: ...

    def children(self, shape: Shape) -> Iterator[tuple[str, Module, Shape]]:
        for i, branch in enumerate(self.branches):
            yield str(i), branch, shape

    def output_shape(self, shape: Shape) -> Shape:
        return self.joined_shape([_shape_through(str(i), branch, shape) for i, branch in enumerate(self.branches)])

    def __call__(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        outputs: list[Value] = []
        new: State = {}
        for i, branch in enumerate(self.branches):
            y, changed = _run(str(i), f"{i}.{branch.kind()}", branch, params, state, x, mode)
            outputs.append(y)
            new |= changed
        return self.join(outputs), new


@dataclass(frozen=True)
class Concat(Branches):
    """The branches' outputs side by side along the first axis of a sample (channels)."""

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


@dataclass(frozen=True)
class Add(Branches):
    """The sum of the branches' outputs."""

    def joined_shape(self, shapes: Sequence[Shape]) -> Shape:
        for i, other in enumerate(shapes):
            if other != shapes[0]:
                raise ShapeError(f"add: the branches must agree, branch 0 gives {shapes[0]}, branch {i} {other}")
        return shapes[0]

    def join(self, outputs: Sequence[Value]) -> Value:
        return reduce(ops.add, outputs)


def _modules(container: Container, name: str, modules: Sequence[Module]) -> tuple[Module, ...]:
    for module in modules:
        if not isinstance(module, Module):
            raise OptionError(f"{container.kind()}: {name} holds {module!r}, expected a module")
    return tuple(modules)
