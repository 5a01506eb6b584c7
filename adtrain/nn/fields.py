"""Checks of the layers' options and input shapes."""

from __future__ import annotations

from math import inf, prod

from adtrain.core import options
from adtrain.core.errors import OptionError, ShapeError
from adtrain.nn.module import Module, Shape

Pair = int | tuple[int, int]


def pair(value: Pair) -> tuple[int, int]:
    """(height, width); an integer is used for both."""
    return value if isinstance(value, tuple) else (value, value)


def size_text(size: tuple[int, ...]) -> str:
    """The size as text: "5x5"."""
    return "x".join(map(str, size))


def check_integers(layer: Module, least: int, *names: str) -> None:
    """Raise OptionError unless each named field is an integer of at least `least`, or None."""
    for name in names:
        value = getattr(layer, name)
        if value is not None:
            options.check_integer(layer.kind(), name, value, least)


def check_pairs(layer: Module, least: int, *names: str) -> None:
    """Raise OptionError unless each named field is an integer of at least `least`, a pair of them, or None."""
    for name in names:
        value = getattr(layer, name)
        sizes = value if isinstance(value, tuple) and len(value) == 2 else (value,)
        if value is not None and not all(options.is_integer(size, least) for size in sizes):
            raise OptionError(
                f"{layer.kind()}: {name} is {value!r}, expected an integer, at least {least}, or a pair of them"
            )


def check_number(layer: Module, name: str, low: float = -inf, below: float = inf) -> None:
    """Raise OptionError unless the named field is a finite number in [low, below)."""
    options.check_number(layer.kind(), name, getattr(layer, name), low, below)


def check_dim(layer: Module, dim: object) -> None:
    """Raise OptionError unless `dim` is an integer other than 0. It counts the axes of a batch, as in PyTorch."""
    if not isinstance(dim, int) or dim == 0:
        raise OptionError(f"{layer.kind()}: dim is {dim!r}, expected an axis other than the batch axis 0")


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


def check_inferred(layer: Module, name: str, size: int, shape: Shape) -> None:
    """Raise ShapeError if the optional field `name` is set and differs from `size`, which the input's shape gives."""
    value = getattr(layer, name)
    if value is not None and value != size:
        hint = "; add flatten before it" if len(shape) > 1 and value == prod(shape) else ""
        reason = f"{name} is {value}, expected {size} for the input {shape}"
        raise ShapeError(f"{layer.kind()}: {reason}{hint}")
