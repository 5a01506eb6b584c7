"""The rows of a model summary, computed from shapes; nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from adtrain.core import tree
from adtrain.nn.attention import TransformerLayer
from adtrain.nn.containers import Container
from adtrain.nn.module import Module, Params, Shape

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
    parameters = {path: prod(size) for path, size in model.parameter_shapes(shape).items()}
    return [
        LayerRow(
            name,
            layer.kind(),
            layer.output_shape(size),
            sum(count for path, count in parameters.items() if path.startswith(f"{name}.".lstrip("."))),
        )
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
