"""Transpose, flip, concatenate, slice and pad: linear primitives, each the transpose of another."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Value, type_with_article
from adtrain.core.axes import Axes, along, letters
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, checked_number
from adtrain.ops.common import ArrayLike, Axis, as_value, integers, normalize_axes, normalize_axis, promote, reshape

__all__ = ["concatenate", "expand_dims", "flip", "pad", "slice", "squeeze", "stack", "transpose"]

Ints = tuple[int, ...]
_range: type[builtins.slice] = builtins.slice  # the builtin, before this module's function takes its name


def _transpose_axes(x: Any, axes: Ints) -> Axes:
    labels = letters(len(axes))
    return Axes((labels,), (tuple(labels[i] for i in axes),))


transpose_p: Primitive = Primitive(
    "transpose",
    lambda x, axes: ArrayType(tuple(x.shape[i] for i in axes), x.dtype),
    lambda x, axes: np.transpose(x, axes),
    [lambda out, x, axes: lambda ct: bind(transpose_p, ct, axes=tuple(sorted(range(len(axes)), key=axes.__getitem__)))],
    no_flops,
    batch=lambda op, mapped, x, axes: op(x, axes=(0, *(i + 1 for i in axes))),
    axes=_transpose_axes,
    traits=(Trait.LINEAR,),
)
flip_p: Primitive = Primitive(
    "flip",
    lambda x, axes: ArrayType(x.shape, x.dtype),
    lambda x, axes: np.flip(x, axes),
    [lambda out, x, axes: lambda ct: bind(flip_p, ct, axes=axes)],
    no_flops,
    axes=lambda x, axes: along(x.ndim, axes),
    traits=(Trait.LINEAR,),
)


def _concatenate_shape(*xs: Any, axis: int) -> ArrayType:
    first = xs[0]
    for x in xs:
        if (
            x.shape[:axis] + x.shape[axis + 1 :] != first.shape[:axis] + first.shape[axis + 1 :]
            or x.dtype != first.dtype
        ):
            raise ShapeError(f"concatenate: shapes {first.shape} and {x.shape} differ beside axis {axis}")
    length = sum(x.shape[axis] for x in xs)
    return ArrayType((*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype)


def _concatenate_rule(argument: int) -> Any:
    def rule(out: Value, *xs: Value, axis: int) -> Any:
        start = sum(x.shape[axis] for x in xs[:argument])
        starts = [0] * out.ndim
        stops = list(out.shape)
        starts[axis], stops[axis] = start, start + xs[argument].shape[axis]
        return lambda ct: slice(ct, starts, stops)

    return rule


concatenate_p: Primitive = Primitive(
    "concatenate",
    _concatenate_shape,
    lambda *xs, axis: np.concatenate(xs, axis),
    _concatenate_rule,
    no_flops,
    axes=lambda *xs, axis: along(xs[0].ndim, (axis,), arguments=len(xs)),
    traits=(Trait.LINEAR,),
)


def _slice_shape(x: Any, starts: Ints, stops: Ints, steps: Ints) -> ArrayType:
    lengths = []
    for n, start, stop, step in zip(x.shape, starts, stops, steps, strict=True):
        if not (0 <= start <= stop <= n and step > 0):
            raise ShapeError(f"slice: {start}:{stop}:{step} does not fit an axis of length {n} of shape {x.shape}")
        lengths.append(-(-(stop - start) // step))
    return ArrayType(tuple(lengths), x.dtype)


def _slice_vjp(out: Value, x: Value, starts: Ints, stops: Ints, steps: Ints) -> Any:
    spans = [(n - 1) * step + 1 if n else 0 for n, step in zip(out.shape, steps, strict=True)]
    high = tuple(n - start - span for n, start, span in zip(x.shape, starts, spans, strict=True))
    return lambda ct: bind(pad_p, ct, low=starts, high=high, gaps=tuple(step - 1 for step in steps), value=0.0)


def _slice_axes(x: Any, starts: Ints, stops: Ints, steps: Ints) -> Axes:
    bounds = zip(x.shape, starts, stops, steps, strict=True)
    return along(x.ndim, [i for i, (n, *given) in enumerate(bounds) if given != [0, n, 1]])


slice_p: Primitive = Primitive(
    "slice",
    _slice_shape,
    lambda x, starts, stops, steps: x[tuple(map(_range, starts, stops, steps))],
    [_slice_vjp],
    no_flops,
    reads=lambda x, starts, stops, steps: (_slice_shape(x, starts, stops, steps).size,),
    batch=lambda op, mapped, x, starts, stops, steps: op(
        x, starts=(0, *starts), stops=(x.shape[0], *stops), steps=(1, *steps)
    ),
    axes=_slice_axes,
    traits=(Trait.LINEAR,),
)


def _pad_shape(x: Any, low: Ints, high: Ints, gaps: Ints, value: float) -> ArrayType:
    if min((*low, *high, *gaps), default=0) < 0:
        raise ShapeError(f"pad: found negative widths {low}, {high} and {gaps}")
    return ArrayType(tuple(map(_padded_length, x.shape, low, high, gaps)), x.dtype)


def _padded_length(n: int, low: int, high: int, gap: int) -> int:
    return low + high + n + gap * max(n - 1, 0)


def _pad_reference(x: np.ndarray, low: Ints, high: Ints, gaps: Ints, value: float) -> np.ndarray:
    lengths = tuple(map(_padded_length, x.shape, low, high, gaps))
    out = np.full(lengths, value, x.dtype)
    out[tuple(_range(a, n - b, g + 1) for a, b, g, n in zip(low, high, gaps, lengths, strict=True))] = x
    return out


def _pad_vjp(out: Value, x: Value, low: Ints, high: Ints, gaps: Ints, value: float) -> Any:
    stops = tuple(n - b for n, b in zip(out.shape, high, strict=True))
    return lambda ct: bind(slice_p, ct, starts=low, stops=stops, steps=tuple(g + 1 for g in gaps))


def _pad_axes(x: Any, low: Ints, high: Ints, gaps: Ints, value: float) -> Axes:
    return along(x.ndim, [i for i, widths in enumerate(zip(low, high, gaps, strict=True)) if any(widths)])


def _pad_taylor(
    trace: Any, k: int, out: Value, x: Value, low: Ints, high: Ints, gaps: Ints, value: float
) -> Value | None:
    coefficient = trace.coefficient(x, k)
    return None if coefficient is None else bind(pad_p, coefficient, low=low, high=high, gaps=gaps, value=0.0)


pad_p: Primitive = Primitive(
    "pad",
    _pad_shape,
    _pad_reference,
    [_pad_vjp],
    no_flops,
    batch=lambda op, mapped, x, low, high, gaps, value: op(
        x, low=(0, *low), high=(0, *high), gaps=(0, *gaps), value=value
    ),
    axes=_pad_axes,
    taylor=_pad_taylor,
)


def transpose(x: ArrayLike, axes: Sequence[int] | None = None) -> Value:
    """Axis i of the result is axis ``axes[i]`` of ``x``; by default the order of axes is reversed.

    Raises:
        ShapeError: ``axes`` is not a permutation of the axes.
    """
    value = as_value(x)
    order = tuple(range(value.ndim))[::-1] if axes is None else integers("transpose", "axes", axes)
    order = tuple(normalize_axis("transpose", a, value.ndim) for a in order)
    if sorted(order) != list(range(value.ndim)):
        raise ShapeError(
            f"transpose: axes {axes} are not a permutation of the {value.ndim} axes of shape {value.shape}"
        )
    return value if order == tuple(range(value.ndim)) else bind(transpose_p, value, axes=order)


def flip(x: ArrayLike, axis: Axis = None) -> Value:
    """Elements in reversed order along ``axis`` (one, several, or all for None)."""
    value = as_value(x)
    return bind(flip_p, value, axes=normalize_axes("flip", axis, value.ndim))


def concatenate(xs: Sequence[ArrayLike], axis: int = 0) -> Value:
    """Join arrays along an existing axis.

    Raises:
        ShapeError: there are none, or their other axes differ.
    """
    values = promote(*_several("concatenate", xs))
    ndim = values[0].ndim
    if any(x.ndim != ndim for x in values):
        raise ShapeError(
            f"concatenate: shapes {', '.join(str(x.shape) for x in values)} differ in their number of axes"
        )
    return bind(concatenate_p, *values, axis=normalize_axis("concatenate", axis, ndim))


def stack(xs: Sequence[ArrayLike], axis: int = 0) -> Value:
    """Join arrays of one shape along a new axis."""
    return concatenate([expand_dims(x, axis) for x in _several("stack", xs)], axis)


def _several(name: str, xs: Sequence[ArrayLike]) -> list[ArrayLike]:
    """The arrays to join. Raises ShapeError if there are none, DTypeError if `xs` is not a sequence."""
    if not isinstance(xs, (Iterable, Value)):
        raise DTypeError(f"{name}: found {type_with_article(xs)}, expected a sequence of arrays")
    if not (found := list(xs)):
        raise ShapeError(f"{name}: found no arrays, expected at least one")
    return found


def slice(x: ArrayLike, starts: Sequence[int], stops: Sequence[int], steps: Sequence[int] | None = None) -> Value:
    """Elements ``starts[i], starts[i] + steps[i], ... < stops[i]`` of each axis; steps are positive, 1 by default.

    Raises:
        ShapeError: bounds are missing, or outside of the shape.
    """
    value = as_value(x)
    first, end = integers("slice", "starts", starts), integers("slice", "stops", stops)
    every = (1,) * value.ndim if steps is None else integers("slice", "steps", steps)
    if not len(first) == len(end) == len(every) == value.ndim:
        raise ShapeError(
            f"slice: found bounds for {len(first)}, {len(end)} and {len(every)} axes, expected {value.ndim}"
        )
    if not any(first) and end == value.shape and set(every) <= {1}:
        return value
    return bind(slice_p, value, starts=first, stops=end, steps=every)


def pad(x: ArrayLike, pad_width: int | Sequence[Any], value: float = 0.0) -> Value:
    """``value`` added before and after the elements along each axis.

    Args:
        pad_width: for each axis a pair (before, after), as `numpy.pad`; one pair or number serves all axes. A negative
            width cuts off that many elements, as in `torch.nn.functional.pad` and `jax.lax.pad`.

    Raises:
        ShapeError: the widths do not fit, or cut off more elements than there are. DTypeError: the array's type cannot
            hold ``value``.
    """
    source = as_value(x)
    try:
        given = np.asarray(pad_width)
        widths = np.broadcast_to(given.astype(int, casting="safe"), (source.ndim, 2)).tolist()
    except (ValueError, TypeError):
        raise ShapeError(f"pad: widths {pad_width} do not fit the {source.ndim} axes of shape {source.shape}") from None
    number = checked_number("pad", value, source.dtype)
    number = float(number) if source.dtype.kind == "f" else number
    cropped = _cropped(source, widths)
    low, high = tuple(max(a, 0) for a, _ in widths), tuple(max(b, 0) for _, b in widths)
    if cropped is not source and not any((*low, *high)):
        return cropped
    return bind(pad_p, cropped, low=low, high=high, gaps=(0,) * source.ndim, value=number)


def _cropped(x: Value, widths: Sequence[Sequence[int]]) -> Value:
    """``x`` without the elements that negative widths cut off."""
    for axis, (n, (low, high)) in enumerate(zip(x.shape, widths, strict=True)):
        if max(-low, 0) + max(-high, 0) > n:
            raise ShapeError(f"pad: widths {low} and {high} cut off more than the {n} elements of axis {axis}")
    starts = [max(-low, 0) for low, _ in widths]
    return slice(x, starts, [n - max(-high, 0) for n, (_, high) in zip(x.shape, widths, strict=True)])


def squeeze(x: ArrayLike, axis: Axis = None) -> Value:
    """Drop axes of length 1: all of them, or ``axis``.

    Raises:
        ShapeError: an axis of ``axis`` is of another length.
    """
    value = as_value(x)
    if axis is None:
        axes = tuple(i for i, n in enumerate(value.shape) if n == 1)
    else:
        axes = normalize_axes("squeeze", axis, value.ndim)
    if any(value.shape[i] != 1 for i in axes):
        raise ShapeError(f"squeeze: axes {axes} of shape {value.shape} are not all of length 1")
    return reshape(value, tuple(n for i, n in enumerate(value.shape) if i not in axes))


def expand_dims(x: ArrayLike, axis: Axis) -> Value:
    """Insert axes of length 1, at positions ``axis`` of the result.

    Raises:
        ShapeError: ``axis`` is None or out of range.
    """
    value = as_value(x)
    if axis is None:
        raise ShapeError("expand_dims: found axis None, expected an axis or several")
    count = len(axis) if isinstance(axis, Sequence) else 1
    axes = normalize_axes("expand_dims", axis, value.ndim + count)
    lengths: list[int] = list(value.shape)
    for i in axes:
        lengths.insert(i, 1)
    return reshape(value, lengths)


def bounds(index: Any, length: int) -> tuple[int, int, int, bool]:
    """A Python slice of an axis as (start, stop, step) with a positive step, and whether the result is flipped."""
    start, stop, step = index.indices(length)
    count = len(range(start, stop, step))
    if step < 0:
        start, step = start + (count - 1) * step, -step
    if count == 0:
        return 0, 0, 1, False
    return start, start + (count - 1) * step + 1, step, index.step is not None and index.step < 0
