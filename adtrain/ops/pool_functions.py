"""Max and average pooling over one, two or three axes: compositions of the primitives for two axes.

Pooling over three axes pools rows and columns first, then planes: the maximum of a window is the maximum of the maxima
of its planes, and the mean is the mean of their means.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.core.options import shown
from adtrain.core.trace import bind
from adtrain.ops.broadcasting import reshape
from adtrain.ops.common import ArrayLike, as_value, require_float
from adtrain.ops.elementwise import add, mul
from adtrain.ops.index import take, take_along_axis
from adtrain.ops.pool import Windows, avg_pool2d_p, max_pool2d_p
from adtrain.ops.pool_windows import AxisWindows, axis_windows, single_elements
from adtrain.ops.reduce import argmax
from adtrain.ops.shape import transpose
from adtrain.ops.windows import Ints, Padding, pad_image

IMAGES = {1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}


def _axis_windows(
    name: str, axes: int, x: Value, kernel: Ints, stride: Ints | None, padding: Padding, dilation: Ints, ceil: bool
) -> list[AxisWindows]:
    if x.ndim != axes + 2:
        raise ShapeError(f"{name}: found shape {x.shape}, expected {IMAGES[axes]}")
    return axis_windows(name, x.shape, kernel, stride, padding, dilation, ceil)


def _primitive_windows(rows: AxisWindows, columns: AxisWindows) -> Windows:
    return Windows((rows.kernel, columns.kernel), (rows.stride, columns.stride), (rows.low, columns.low))


def _constant(numbers: np.ndarray, like: Value) -> Value:
    return array(numbers, device=like.device)


def _max_2d(x: Value, rows: AxisWindows, columns: AxisWindows) -> tuple[Value, Value]:
    """Maxima of (N, C, H, W), and their positions in the window. Unsupported windows are gathered first."""
    floating = x.dtype.kind == "f"
    if floating and rows.supported and columns.supported:
        maxima, where = bind(max_pool2d_p, x, windows=_primitive_windows(rows, columns))
        return maxima, where
    for axis, along in ((2, rows), (3, columns)):
        if along.kernel > 1 or along.outputs != along.length:
            x = take(x, _constant(along.positions_in_image().ravel(), x), axis)
    kernel = (rows.kernel, columns.kernel)
    if floating:
        maxima, where = bind(max_pool2d_p, x, windows=Windows(kernel, kernel, (0, 0)))
        return maxima, where
    n, c = x.shape[:2]
    split = reshape(x, (n, c, rows.outputs, rows.kernel, columns.outputs, columns.kernel))
    windows = reshape(transpose(split, (0, 1, 2, 4, 3, 5)), (n, c, rows.outputs, columns.outputs, prod(kernel)))
    where = argmax(windows, -1, keepdims=True)
    return reshape(take_along_axis(windows, where, -1), where.shape[:-1]), reshape(where, where.shape[:-1])


def _flat_positions(where: Value, rows: AxisWindows, columns: AxisWindows) -> Value:
    """Positions in windows as flat positions in the image (H, W), int64."""
    taps = np.arange(rows.kernel * columns.kernel)
    starts = (np.arange(rows.outputs) * rows.kernel)[:, None], (np.arange(columns.outputs) * columns.kernel)[None]
    parts = []
    for tap, start, at in (
        (taps // columns.kernel, starts[0], rows.positions_in_image() * columns.length),
        (taps % columns.kernel, starts[1], columns.positions_in_image()),
    ):
        entry = add(take(_constant(tap, where), where), _constant(start, where))
        parts.append(take(_constant(at.ravel(), where), entry))
    return add(*parts)


def _max_pool(
    axes: int, x: ArrayLike, kernel: Ints, stride: Any, padding: Padding, dilation: Ints, ceil: bool, indices: bool
) -> Any:
    name, value = f"max_pool{axes}d", as_value(x)
    if value.dtype.kind not in "fiu":
        raise DTypeError(f"{name}: found {value.dtype}, expected numbers; use astype")
    windows = _axis_windows(name, axes, value, kernel, stride, padding, dilation, ceil)
    batch, rows, columns = value.shape[:2], windows[-2] if axes > 1 else single_elements(1), windows[-1]
    shape = (*batch, *(along.outputs for along in windows))
    depth = windows[0].length if axes == 3 else 1
    images = value if axes == 2 else reshape(value, (batch[0], batch[1] * depth, rows.length, columns.length))
    maxima, where = _max_2d(images, rows, columns)
    flat = _flat_positions(where, rows, columns) if indices else None
    if axes == 3:
        count = rows.outputs * columns.outputs
        elements = single_elements(count)
        maxima, where = _max_2d(reshape(maxima, (*batch, depth, count)), windows[0], elements)
        if flat is not None:
            planes = _constant((np.arange(depth) * (rows.length * columns.length))[:, None], flat)
            flat = reshape(add(reshape(flat, (*batch, depth, count)), planes), (*batch, depth * count))
            flat = take_along_axis(flat, reshape(_flat_positions(where, windows[0], elements), (*batch, -1)), 2)
    maxima = reshape(maxima, shape)
    return maxima if flat is None else (maxima, reshape(flat, shape))


def _mean_2d(x: Value, rows: AxisWindows, columns: AxisWindows) -> Value:
    """Sums over windows of (N, C, H, W), each divided by KH KW, also where a window is partial."""
    if rows.supported and columns.supported:
        return bind(avg_pool2d_p, x, windows=_primitive_windows(rows, columns))
    widths = [(s.low, max((s.outputs - 1) * s.stride + s.kernel - s.low - s.length, 0)) for s in (rows, columns)]
    unpadded = [s._replace(low=0, high=0) for s in (rows, columns)]
    return bind(avg_pool2d_p, pad_image(x, tuple(widths)), windows=_primitive_windows(*unpadded))


def _avg_pool(
    axes: int, x: ArrayLike, kernel: Ints, stride: Any, padding: Padding, ceil: bool, include: bool, divisor: int | None
) -> Value:
    name, value = f"avg_pool{axes}d", as_value(x)
    require_float(name, value)
    windows = _axis_windows(name, axes, value, kernel, stride, padding, 1, ceil)
    if divisor is not None and (not isinstance(divisor, (int, np.integer)) or isinstance(divisor, bool) or not divisor):
        raise OptionError(f"{name}: divisor_override is {shown(divisor)}, expected an integer other than 0")
    batch, rows, columns = value.shape[:2], windows[-2] if axes > 1 else single_elements(1), windows[-1]
    depth = windows[0].length if axes == 3 else 1
    images = value if axes == 2 else reshape(value, (batch[0], batch[1] * depth, rows.length, columns.length))
    out = _mean_2d(images, rows, columns)
    if axes == 3:
        count = rows.outputs * columns.outputs
        out = _mean_2d(reshape(out, (*batch, depth, count)), windows[0], single_elements(count))
    out = reshape(out, (*batch, *(along.outputs for along in windows)))
    factor = np.array(prod(s.kernel for s in windows), np.float64)
    if divisor is not None:
        factor = factor / divisor
    else:
        for axis, along in enumerate(windows):
            factor = factor / along.divisors(include).reshape((-1,) + (1,) * (axes - 1 - axis))
    return out if (factor == 1).all() else mul(out, _constant(factor.astype(value.dtype), value))


def max_pool1d(
    x: ArrayLike,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Padding = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`max_pool2d` of (N, C, L)."""
    return _max_pool(1, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(
    x: ArrayLike,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Padding = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest element of each window, (N, C, H, W) to (N, C, OH, OW), as `torch.nn.functional.max_pool2d`.

    The gradient goes to the first of equal elements, and to the last NaN if there is one.

    Args:
        x: numbers of any type; integers have no gradient.
        stride: the window's own size by default.
        padding: elements of -infinity on each side, at most half the window: an integer, an integer for each axis, a
            pair (before, after) for each axis, "valid" (no padding) or "same" (OH is H / stride, rounded up).
        dilation: the distance between neighbouring elements of a window.
        ceil_mode: keep a partial window at the end if it starts in the image or in the padding before it.
        return_indices: also return the flat positions of the maxima in the image, int64.

    Returns:
        The maxima; with ``return_indices`` a pair of the maxima and their positions.

    Raises:
        ShapeError: the window is larger than the padded image, or the padding than half the window.
    """
    return _max_pool(2, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(
    x: ArrayLike,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Padding = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`max_pool2d` of (N, C, D, H, W)."""
    return _max_pool(3, x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def avg_pool1d(
    x: ArrayLike,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """`avg_pool2d` of (N, C, L)."""
    return _avg_pool(1, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool2d(
    x: ArrayLike,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """The mean of each window, as `torch.nn.functional.avg_pool2d`; other arguments and errors as `max_pool2d`.

    Args:
        count_include_pad: count the zeros of the padding as elements.
        divisor_override: divide the sums by this integer instead of the number of elements.
    """
    return _avg_pool(2, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool3d(
    x: ArrayLike,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """`avg_pool2d` of (N, C, D, H, W)."""
    return _avg_pool(3, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
