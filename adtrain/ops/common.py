"""Shared by the families of operations: checks of axes and types, promotion, broadcasting, the elementwise primitive.

broadcast_to and sum are transposes of each other, and a reshape is that of another reshape. With them every elementwise
primitive can require equal shapes, and its derivative by a broadcast argument needs no code of its own. Python numbers
have no derivative, so they stay arrays of shape () and cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np

from adtrain.core.array import NUMBERS, TracedNumber, Value, array
from adtrain.core.axes import aligned, reshaped, without
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.core.options import InConfig, shown
from adtrain.core.primitive import Primitive, Trait, VjpRule, no_flops
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.option_types import ClassWeights

__all__ = ["broadcast_to", "reshape", "sum_to"]

F = TypeVar("F", bound=Callable[..., Any])

ArrayLike: TypeAlias = Any
"""A Value, a NumPy array, nested lists, or a Python number, which may be traced."""
ClassFactors: TypeAlias = Annotated[ArrayLike, InConfig(ClassWeights)]
"""A factor for each class. A config has a list of numbers."""
BalancedFactors: TypeAlias = Annotated[ArrayLike, InConfig(ClassWeights | Literal["balanced"])]
"""`ClassFactors`. In a config `balanced` stands for factors that give each class of the training examples one total."""

Axis: TypeAlias = "int | Sequence[int] | None"
Unary: TypeAlias = Callable[[ArrayLike], Value]
Binary: TypeAlias = Callable[[ArrayLike, ArrayLike], Value]


def as_value(x: ArrayLike, device: str | None = None) -> Value:
    """``x`` itself if it is a value, a traced number as float32, all else as an Array on ``device``; None: the CPU."""
    if isinstance(x, TracedNumber):
        return x.array()
    return x if isinstance(x, Value) else array(x, device=device)


def broadcast_shapes(name: str, *shapes: Shape) -> Shape:
    """The shape to which several broadcast, by NumPy's rules. Raises ShapeError if there is none."""
    ndim = max(map(len, shapes))
    lengths = [1] * ndim
    for shape in shapes:
        for i, length in enumerate(shape, ndim - len(shape)):
            if length != 1:
                if lengths[i] not in (1, length):
                    raise ShapeError(f"{name}: shapes {' and '.join(map(str, shapes))} do not broadcast together")
                lengths[i] = length
    return tuple(lengths)


def integers(name: str, option: str, given: int | Sequence[int]) -> Shape:
    """One integer or several as a tuple. Raises OptionError for another type, TraceError for a traced number."""
    try:
        return (index(given),) if isinstance(given, (int, np.integer)) else tuple(map(index, given))
    except TypeError:
        for number in (given,) if isinstance(given, TracedNumber) else given if isinstance(given, Sequence) else ():
            if isinstance(number, TracedNumber):
                float(number)  # raises TraceError, which says what to do
    raise OptionError(f"{name}: {option} is {shown(given)}, expected an integer or several")


def normalize_axis(name: str, axis: int, ndim: int) -> int:
    """An axis as a non-negative number. Raises OptionError if it is no integer, ShapeError if it is out of range."""
    if not isinstance(axis, (int, np.integer)):
        raise OptionError(f"{name}: found axis {shown(axis)}, expected an integer")
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{name}: axis {axis} is out of range for an array of {ndim} dimensions")
    return int(axis) % ndim


def normalize_axes(name: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """Axes as sorted non-negative numbers; None means all. For a 0-d array, axis 0 and -1 mean no axis.

    Raises the errors of `normalize_axis`, and ShapeError for an axis that is given twice.
    """
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
    """Raise DTypeError for an array or type that is not of floating point."""
    for x in xs:
        if x.dtype.kind != "f":
            raise DTypeError(f"{name}: found {x.dtype}, expected float32 or float64; use astype")


def elementwise_type(name: str, *xs: Any) -> ArrayType:
    """The common type of arguments; some may be numbers, of shape (). Raises ShapeError if they have none."""
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


astype_p: Primitive = Primitive(
    "astype",
    lambda x, dtype: ArrayType(x.shape, dtype),
    lambda x, dtype: x.astype(dtype),
    [lambda out, x, dtype: partial(bind, astype_p, dtype=x.dtype)],
    no_flops,
    expression="(U)a",
    traits=(Trait.LINEAR,),
)


def _reshape_shape(x: Any, shape: Shape) -> ArrayType:
    if math.prod(shape) != x.size:
        raise ShapeError(f"reshape: {x.size} elements of shape {x.shape} do not fit into shape {shape}")
    return ArrayType(shape, x.dtype)


reshape_p: Primitive = Primitive(
    "reshape",
    _reshape_shape,
    lambda x, shape: np.reshape(x, shape),
    [lambda out, x, shape: partial(bind, reshape_p, shape=x.shape)],
    no_flops,
    view=True,
    traits=(Trait.RESHAPE, Trait.LINEAR),
    batch=lambda op, mapped, x, shape: op(x, shape=(x.shape[0], *shape)),
    axes=lambda x, shape: reshaped(x.shape, shape),
)


def summed(dtype: np.dtype) -> np.dtype:
    """The dtype of a sum of elements of ``dtype``: int64 for integers and bool."""
    return dtype if dtype.kind == "f" else np.dtype(np.int64)


def _sum_shape(x: Any, axes: tuple[int, ...]) -> ArrayType:
    return ArrayType(tuple(n for i, n in enumerate(x.shape) if i not in axes), summed(x.dtype))


def accurate_sum(x: np.ndarray, axes: tuple[int, ...], keepdims: bool = False) -> np.ndarray:
    """NumPy's sum, with an error that hardly grows with the number of elements.

    NumPy's sum over the last axes is pairwise. Its sum over other axes is sequential, so float32 is added in float64.
    """
    trailing = axes == tuple(range(x.ndim - len(axes), x.ndim))
    dtype = np.dtype(np.float64) if x.dtype == np.float32 and not trailing else summed(x.dtype)
    total: Any = np.sum(x, axis=axes, dtype=dtype, keepdims=keepdims)
    found: np.ndarray = total.astype(summed(x.dtype), copy=False)
    return found


sum_p: Primitive = Primitive(
    "sum",
    _sum_shape,
    accurate_sum,
    [lambda out, x, axes: partial(spread, shape=x.shape, axes=axes)],
    lambda x, axes: x.size,
    traits=(Trait.REDUCTION, Trait.LINEAR),
    axes=lambda x, axes: without(x.ndim, axes, added=True),
)


def _broadcast_to_shape(x: Any, shape: Shape) -> ArrayType:
    if broadcast_shapes("broadcast_to", x.shape, shape) != shape:
        raise ShapeError(f"broadcast_to: shape {x.shape} does not broadcast to {shape}")
    return ArrayType(shape, x.dtype)


def _broadcast_to_reference(x: np.ndarray, shape: Shape) -> np.ndarray:
    if x.ndim:
        return np.broadcast_to(x, shape)
    # the same as np.broadcast_to, which is slow for a number
    return np.ndarray(shape, x.dtype, x, strides=(0,) * len(shape))


def _broadcast_to_batch(op: Any, mapped: Any, x: Value, shape: Shape) -> Value:
    members, *own = x.shape
    aligned = reshape(x, (members, *(1 for _ in shape[len(own) :]), *own))
    return op(aligned, shape=(members, *shape))


broadcast_to_p: Primitive = Primitive(
    "broadcast_to",
    _broadcast_to_shape,
    _broadcast_to_reference,
    [lambda out, x, shape: partial(sum_to, shape=x.shape)],
    no_flops,
    view=True,
    traits=(Trait.BROADCAST, Trait.LINEAR),
    batch=_broadcast_to_batch,
    axes=lambda x, shape: aligned((x.shape,), (tuple(shape),)),
)


def reshape(x: ArrayLike, shape: int | Sequence[int]) -> Value:
    """The elements in the same order in another shape. One length may be -1: it follows from the others.

    Raises:
        ShapeError: the number of elements differs, or a length is negative. OptionError: a length is no integer.
    """
    value = as_value(x)
    lengths = integers("reshape", "shape", shape)
    if lengths.count(-1) == 1:
        known = -math.prod(lengths)
        if known == 0 or value.size % known:
            raise ShapeError(f"reshape: {value.size} elements of shape {value.shape} do not fit into shape {lengths}")
        lengths = tuple(value.size // known if n == -1 else n for n in lengths)
    elif any(n < 0 for n in lengths):
        raise ShapeError(f"reshape: found a negative length in shape {lengths}, expected at most one -1")
    return value if lengths == value.shape else bind(reshape_p, value, shape=lengths)


def broadcast_to(x: ArrayLike, shape: Sequence[int]) -> Value:
    """``x`` repeated along new axes and axes of length 1 up to ``shape``, by NumPy's rules.

    Raises:
        ShapeError: they do not broadcast together, or to another shape.
    """
    value, lengths = as_value(x), integers("broadcast_to", "shape", shape)
    return value if value.shape == lengths else bind(broadcast_to_p, value, shape=lengths)


def sum_to(x: ArrayLike, shape: Sequence[int]) -> Value:
    """The transpose of `broadcast_to`: sum over the axes that a broadcast from ``shape`` to ``x.shape`` repeats.

    Raises:
        ShapeError: ``shape`` does not broadcast to ``x.shape``.
    """
    value, lengths = as_value(x), integers("sum_to", "shape", shape)
    if value.shape == lengths:
        return value
    if broadcast_shapes("sum_to", value.shape, lengths) != value.shape:
        raise ShapeError(f"sum_to: shape {lengths} does not broadcast to {value.shape}")
    new = value.ndim - len(lengths)
    repeated = (i + new for i, n in enumerate(lengths) if n == 1 and value.shape[i + new] != 1)
    return reshape(bind(sum_p, value, axes=(*range(new), *repeated)), lengths)


def keep_axes(shape: Shape, axes: Sequence[int]) -> Shape:
    """``shape`` with length 1 at ``axes``."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def spread(x: Value, shape: Shape, axes: Sequence[int]) -> Value:
    """The result of a reduction over ``axes`` repeated along them, up to ``shape``."""
    return broadcast_to(reshape(x, keep_axes(shape, axes)), shape)


def along_axis(name: str, primitive: Primitive, x: ArrayLike, axis: int, **params: Any) -> Value:
    """``primitive`` along one axis, with a result of the same shape. A 0-d array is taken as an axis of one element."""
    value = as_value(x)
    rows = reshape(value, (1,)) if value.ndim == 0 and axis in (0, -1) else value
    out = bind(primitive, rows, axis=normalize_axis(name, axis, rows.ndim), **params)
    return reshape(out, value.shape)


def promote(*xs: ArrayLike) -> list[Value]:
    """Values of one dtype. Arguments that are no Values are moved to the device of the Values.

    Arrays are converted to their widest floating-point type. A Python number takes the dtype of the arrays. Exceptions:
    integer arrays and a float give float32; bool arrays and an integer give int64.
    """
    device = next((x.device for kind in (Value, TracedNumber) for x in xs if isinstance(x, kind)), "cpu")
    values = [x if isinstance(x, (Value, *NUMBERS)) else array(x, device=device) for x in xs]
    dtypes = {x.dtype for x in values if isinstance(x, Value)} or {as_value(x).dtype for x in xs}
    if len(dtypes) > 1:
        dtypes = {np.result_type(*([dtype for dtype in dtypes if dtype.kind == "f"] or dtypes))}
    (dtype,) = dtypes
    if dtype.kind != "f" and any(isinstance(x, (float, TracedNumber)) for x in values):
        dtype = np.dtype(np.float32)
    elif dtype == np.bool_ and not all(isinstance(x, (Value, bool)) for x in values):
        dtype = np.dtype(np.int64)
    return [_of_type(x, dtype, device) for x in values]


def _of_type(x: Value | TracedNumber | float, dtype: np.dtype, device: str) -> Value:
    if isinstance(x, Value):
        return x if x.dtype == dtype else bind(astype_p, x, dtype=dtype)
    return x.array(dtype) if isinstance(x, TracedNumber) else array(x, dtype, device)


def floating(x: Value) -> Value:
    """``x`` itself, or integers as float32."""
    return x if x.dtype.kind == "f" else bind(astype_p, x, dtype=np.dtype(np.float32))


def broadcast(name: str, *xs: ArrayLike) -> list[Value]:
    """Values of one dtype and, by NumPy's rules, one shape. Python numbers keep shape ()."""
    values = promote(*xs)
    shape = values[0].shape
    if all(x.shape == shape for x in values):
        return values
    shape = broadcast_shapes(name, *(x.shape for x in values))
    return [
        value if value.shape == shape or isinstance(x, NUMBERS) else bind(broadcast_to_p, value, shape=shape)
        for x, value in zip(xs, values, strict=True)
    ]


def unary(primitive: Primitive, meaning: str) -> Unary:
    """The operation that applies an elementwise primitive of one argument."""

    def apply(x: ArrayLike) -> Value:
        return bind(primitive, as_value(x))

    return named(apply, primitive.name, f"{meaning}, element by element.")


def binary(primitive: Primitive, meaning: str, prepared: Callable[..., Iterable[Value]] = broadcast) -> Binary:
    """The operation that applies an elementwise primitive to two arguments, which are broadcast together."""

    def apply(a: ArrayLike, b: ArrayLike) -> Value:
        return bind(primitive, *prepared(primitive.name, a, b))

    return named(apply, primitive.name, meaning)


def named(f: F, name: str, doc: str) -> F:
    """`f` as the function `name` of `adtrain.ops`: keys of cached Programs find it there."""
    f.__module__, f.__name__, f.__qualname__ = __package__, name, name
    f.__doc__ = doc
    return f
