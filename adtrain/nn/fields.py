"""Checks of the shapes of the layers' inputs."""

from __future__ import annotations

from math import prod

from adtrain.core.errors import ShapeError
from adtrain.nn.module import Module, Shape

IMAGE_AXES = ("channels", "height", "width")
Pair = int | tuple[int, int]


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
