"""Shared by the families of operations: checks of axes and types, and the elementwise primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.core.options import shown
from adtrain.core.primitive import Primitive, Trait, VjpRule
from adtrain.core.traced_number import TracedNumber
from adtrain.core.types import ArrayType, Shape
from adtrain.option_types import ClassWeights, InConfig

ArrayLike: TypeAlias = Any
"""A Value, a NumPy array, nested lists, or a Python number, which may be traced."""
ClassFactors: TypeAlias = Annotated[ArrayLike, InConfig(ClassWeights)]
"""A factor for each class. A config has a list of numbers."""
BalancedFactors: TypeAlias = Annotated[ArrayLike, InConfig(ClassWeights | Literal["balanced"])]
"""`ClassFactors`. In a config `balanced` stands for factors that give each class of the training examples one total."""

Axis: TypeAlias = "int | Sequence[int] | None"


def as_value(x: ArrayLike, device: str | None = None) -> Value:
    """``x`` itself if it is a value, a traced number as float32, all else as an Array on ``device``; None: the CPU."""
    if isinstance(x, TracedNumber):
        return x.array()
    return x if isinstance(x, Value) else array(x, device=device)


def broadcast_shapes(name: str, *shapes: Shape) -> Shape:
    """The shape to which several broadcast, by NumPy's rules."""
    ndim = max(map(len, shapes))
    lengths = [1] * ndim
    for shape in shapes:
        for i, length in enumerate(shape, ndim - len(shape)):
            if length != 1:
                if lengths[i] not in (1, length):
                    raise ShapeError(f"{name}: shapes {' and '.join(map(str, shapes))} do not broadcast together")
                lengths[i] = length
    return tuple(lengths)


def normalize_axis(name: str, axis: int, ndim: int) -> int:
    if not isinstance(axis, (int, np.integer)):
        raise OptionError(f"{name}: found axis {shown(axis)}, expected an integer")
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{name}: axis {axis} is out of range for an array of {ndim} dimensions")
    return int(axis) % ndim


def normalize_axes(name: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """Axes as sorted non-negative numbers; None means all. For a 0-d array, axis 0 and -1 mean no axis."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    if ndim == 0 and axes in ((0,), (-1,)):
        return ()
    found = sorted({normalize_axis(name, a, ndim) for a in axes})
    if len(found) != len(axes):
        raise ShapeError(f"{name}: axis {axis} names an axis twice")
    return tuple(found)


def require_float(name: str, *xs: Any) -> None:
    for x in xs:
        if x.dtype.kind != "f":
            raise DTypeError(f"{name}: found {x.dtype}, expected float32 or float64; use astype")


def elementwise_type(name: str, *xs: Any) -> ArrayType:
    """The common type of arguments; some may be numbers, of shape ()."""
    first = max(xs, key=lambda x: len(x.shape)) if len(xs) > 1 else xs[0]
    for x in xs:
        if x.shape not in (first.shape, ()) or x.dtype != first.dtype:
            raise ShapeError(f"{name}: found {ArrayType(first.shape, first.dtype)} and {ArrayType(x.shape, x.dtype)}")
    return ArrayType(first.shape, first.dtype)


def elementwise(
    name: str,
    cpu: Callable[..., np.ndarray],
    expression: str | Callable[..., str],
    *vjp: VjpRule | None,
    floating: bool = True,
    instead_of_bool: str | None = "use astype",
    result: Any = None,
    traits: tuple[Trait, ...] = (),
    taylor: Callable[..., Value | None] | None = None,
) -> Primitive:
    """A primitive that maps arrays of one shape and dtype (or shape (), for a number) element by element.

    Args:
        cpu: the function of NumPy arrays.
        expression: the same in C, for one element; see `Primitive`. Integers wrap around because the caller stores
            the value in a variable of the output's type. Fractions are written (T)0.5: a bare 0.5 is a double.
        vjp: a rule for each argument.
        floating: integers and bool are refused.
        instead_of_bool: advice in the error that refuses bool; None: bool is accepted.
        result: the dtype of the output if it differs from that of the arguments.
        traits, taylor: as those of `Primitive`.
    """
    dtype = None if result is None else np.dtype(result)

    def shape(*xs: Any, **params: Any) -> ArrayType:
        common = elementwise_type(name, *xs)
        if floating:
            require_float(name, common)
        elif common.dtype == np.bool_ and instead_of_bool:
            raise DTypeError(f"{name}: found bool, expected numbers; {instead_of_bool}")
        return common if dtype is None else ArrayType(common.shape, dtype)

    return Primitive(name, shape, cpu, vjp, expression=expression, traits=traits, taylor=taylor)
