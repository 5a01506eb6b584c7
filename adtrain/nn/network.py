"""What is done with a whole network: the rows of its summary, and low-rank adaptation.

The summary is computed from shapes; nothing is allocated. Low-rank adaptation leaves weights as they are, and trains
products of two small matrices that are added to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import OptionError
from adtrain.nn.attention import MultiheadAttention, TransformerLayer
from adtrain.nn.containers import Container, Sequential
from adtrain.nn.init import drawn
from adtrain.nn.linear import A, B, Linear
from adtrain.nn.module import Module, Params, Shape, State

CHILD_NAMES = {"body", "shortcut", *TransformerLayer.CHILDREN}
"""The names of children that are not numbers."""


class LayerRow(NamedTuple):
    """One layer: dotted name in the model, kind, shape of one output sample, number of parameters."""

    name: str
    kind: str
    output_shape: Shape
    parameters: int


def describe(model: Module, shape: Shape) -> list[LayerRow]:
    """One row for each layer, in the order they run, for input samples of `shape`; containers are expanded.

    Raises ShapeError if a layer does not fit its input.
    """
    model.output_shape(shape)
    return [
        LayerRow(name, layer.kind(), layer.output_shape(size), sum(map(prod, layer.parameter_shapes(size).values())))
        for name, layer, size in layers(model, shape)
    ]


def layers(module: Module, shape: Shape, name: str = "") -> Iterator[tuple[str, Module, Shape]]:
    """Each layer with its name and the shape of an input sample, in the order they run; containers are expanded."""
    if isinstance(module, Container):
        for child_name, child, child_shape in module.children(shape):
            yield from layers(child, child_shape, f"{name}.{child_name}" if name else child_name)
    else:
        yield name, module, shape


def count_parameters(params: Params) -> int:
    """The number of elements in a tree of arrays."""
    return sum(leaf.size for leaf in tree.leaves(params))


def layer_of(scope: str) -> tuple[str, str]:
    """The layer's name and kind in a scope: ("2.body.0", "conv2d") for "2.residual.body.0.conv2d".

    A scope that is not a layer's, such as "loss", is returned as the name, with kind "".
    """
    parts = scope.split(".")
    names = [part for part in parts if part.isdigit() or part in CHILD_NAMES]
    return (".".join(names), parts[-1]) if names else (scope, "")


@dataclass(frozen=True, init=False, repr=False)
class LowRankSequential(Sequential):
    """A Sequential whose weights W at some paths are W + B A (E. Hu et al., "LoRA", 2021).

    These are weights (out, in) of linear layers and attention whose path matches one of `paths`, such as
    "*.self_attn.*". A (rank, in) is drawn as a weight of a linear layer, and B (out, rank) is 0. They are parameters
    beside W, "0.weight_lora_a" and "0.weight_lora_b".
    """

    layers: tuple[Module, ...]
    rank: int
    paths: tuple[str, ...]

    def __init__(self, *layers: Module, rank: int, paths: tuple[str, ...] = ("*",)) -> None:
        super().__init__(*layers)
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "paths", paths)

    def adapted(self, shape: Shape) -> dict[str, Shape]:
        """The weights with a product, for input samples of `shape`.

        Raises OptionError for a pattern that matches no weight of a linear layer or attention.
        """
        weights = _weights(self, shape)
        for pattern in self.paths:
            if not any(fnmatchcase(path, pattern) for path in weights):
                known = ", ".join(list(weights)[:8]) + (", ..." if len(weights) > 8 else "")
                raise OptionError(f"found {pattern}, which matches no weight of a linear layer (known: {known})")
        return {path: size for path, size in weights.items() if any(fnmatchcase(path, x) for x in self.paths)}

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        found = super().parameter_shapes(shape)
        for path, (rows, columns) in self.adapted(shape).items():
            found |= {path + A: (self.rank, columns), path + B: (rows, self.rank)}
        return found

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        params, state = super().new_arrays(shape, rng, dtype)
        for path, (rows, columns) in self.adapted(shape).items():
            *modules, name = path.split(".")
            inside = params
            for module in modules:
                inside = inside[module]
            inside[name + A] = drawn("kaiming_uniform", (self.rank, columns), rng, dtype)
            inside[name + B] = array(np.zeros((rows, self.rank), dtype))
        return params, state


def _weights(model: Sequential, shape: Shape) -> dict[str, Shape]:
    """The weights of linear layers and attention by path, without those of tied layers."""
    found: dict[str, Shape] = {}
    for name, layer, size in layers(model, shape):
        if isinstance(layer, (Linear, MultiheadAttention)):
            sizes = layer.parameter_shapes(size)
            found |= {f"{name}.{key}": x for key, x in sizes.items() if len(x) == 2}
    return found


def is_low_rank(path: str) -> bool:
    """Whether the parameter with this path is one of those that are added to a network."""
    return path.endswith((A, B))


def with_products(params: Params) -> Params:
    """Parameters with the products in the weights, computed in float64: those of the Sequential without adaptation."""
    found: Params = {}
    for name, x in params.items():
        if isinstance(x, dict):
            found[name] = with_products(x)
        elif not is_low_rank(name):
            found[name] = x
            if name + A in params:
                a, b = (params[name + end].numpy().astype(np.float64) for end in (A, B))
                found[name] = array((x.numpy() + b @ a).astype(x.dtype), device=x.device)
    return found
