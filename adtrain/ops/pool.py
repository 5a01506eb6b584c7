"""Max and average pooling over one, two or three axes, and adaptive pooling.

The primitives are for two axes. Max pooling returns the position of each maximum too. max_pool2d_pick gathers from
these positions, max_pool2d_put scatters to them: they are transposes, and the derivatives of max pooling.

Pooling over three axes pools rows and columns first, then planes: the maximum of a window is the maximum of the maxima
of its planes, and the mean is the mean of their means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.core.options import shown
from adtrain.core.precision import FULL, matmul_precision
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.ops.common import ArrayLike, as_value, require_float, reshape
from adtrain.ops.elementwise import add, mul
from adtrain.ops.index import take, take_along_axis
from adtrain.ops.matmul import matmul
from adtrain.ops.reduce import argmax, mean
from adtrain.ops.shape import transpose
from adtrain.ops.windows import LIMIT, Ints, Padding, pad_image, paddings, per_axis

__all__ = ["adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"]

Pair = tuple[int, int]


class Windows(NamedTuple):
    """Static parameters of a pooling, each a pair (rows, columns)."""

    kernel: Pair
    stride: Pair
    padding: Pair

    def output_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """(N, C, H, W) to (N, C, OH, OW)."""
        if len(shape) != 4:
            raise ShapeError(f"{name}: found shape {tuple(shape)}, expected (N, C, H, W)")
        lengths = []
        for i in (0, 1):
            fits = shape[i + 2] + 2 * self.padding[i] - self.kernel[i]
            if fits < 0:
                raise ShapeError(
                    f"{name}: window {self.kernel[0]}x{self.kernel[1]} is larger than the input "
                    f"{shape[2]}x{shape[3]} with padding {self.padding}"
                )
            lengths.append(fits // self.stride[i] + 1)
        return (*shape[:2], *lengths)

    def taps(self, padded: np.ndarray, out: Sequence[int]) -> Iterator[np.ndarray]:
        """For each position in the window, row by row, a view (N, C, OH, OW) of that element of all windows."""
        sh, sw = self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield padded[:, :, i : i + sh * (out[0] - 1) + 1 : sh, j : j + sw * (out[1] - 1) + 1 : sw]

    def first_inside(self, out: Sequence[int]) -> np.ndarray:
        """For each of (OH, OW) windows, its first position that is not in the padding."""
        top, left = (
            np.maximum(p - s * np.arange(n), 0) for p, s, n in zip(self.padding, self.stride, out, strict=True)
        )
        return top[:, None] * self.kernel[1] + left

    def pad(self, x: np.ndarray, value: float) -> np.ndarray:
        ph, pw = self.padding
        if not (ph or pw):
            return x
        return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=value)

    def spread(
        self, shape: Sequence[int], dtype: np.dtype, out: Sequence[int], fill: Callable[..., None]
    ) -> np.ndarray:
        """Zeros of ``shape`` after ``fill(position, view)`` has added to each position of the windows."""
        (n, c, h, w), (ph, pw) = shape, self.padding
        padded = np.zeros((n, c, h + 2 * ph, w + 2 * pw), dtype)
        for position, view in enumerate(self.taps(padded, out)):
            fill(position, view)
        return padded[:, :, ph : ph + h, pw : pw + w]


def _max_shape(x: Any, windows: Windows) -> tuple[ArrayType, ArrayType]:
    require_float("max_pool2d", x)
    shape = windows.output_shape("max_pool2d", x.shape)
    return ArrayType(shape, x.dtype), ArrayType(shape, np.dtype(np.int32))


def _max_reference(x: np.ndarray, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """The maxima, and their positions in the window: that of the first maximum, or of the last NaN if there is one.

    A position is never in the padding. If all elements are -infinity, it is the first one inside the image.
    """
    out = windows.output_shape("max_pool2d", x.shape)[2:]
    taps = list(windows.taps(windows.pad(x, -np.inf), out))
    best = np.array(taps[0])
    for tap in taps[1:]:
        np.maximum(best, tap, out=best)
    before = np.ones(best.shape, bool)
    where = np.zeros(best.shape, np.uint8 if len(taps) < 256 else np.int32)
    for tap in taps[:-1]:
        before &= tap != best
        where += before
    if any(windows.padding):
        where = np.where(best == -np.inf, windows.first_inside(out), where)
    if np.isnan(best).any():
        for position, tap in enumerate(taps):
            where[np.isnan(tap)] = position
    return best, where.astype(np.int32)


def _put_reference(ct: np.ndarray, where: np.ndarray, windows: Windows, shape: Sequence[int]) -> np.ndarray:
    disjoint = windows.stride[0] >= windows.kernel[0] and windows.stride[1] >= windows.kernel[1]

    def fill(position: int, view: np.ndarray) -> None:
        chosen = np.where(where == position, ct, ct.dtype.type(0))
        if disjoint:
            view[...] = chosen
        else:
            view += chosen

    return windows.spread(shape, ct.dtype, ct.shape[2:], fill)


def _pick_reference(x: np.ndarray, where: np.ndarray, windows: Windows) -> np.ndarray:
    out = np.zeros(where.shape, x.dtype)
    for position, view in enumerate(windows.taps(windows.pad(x, 0), where.shape[2:])):
        np.copyto(out, view, where=where == position)
    return out


def _put(ct: Value, where: Value, windows: Windows, shape: Shape) -> Value:
    return bind(max_pool2d_put_p, ct, where, windows=windows, shape=shape)


def _max_vjp(out: tuple[Value, Value], x: Value, windows: Windows) -> Callable[[Any], Value]:
    where, shape = out[1], x.shape
    return lambda cts: _put(cts[0], where, windows, shape)


max_pool2d_p: Primitive = Primitive(
    "max_pool2d",
    _max_shape,
    _max_reference,
    [_max_vjp],
    lambda x, windows: _max_shape(x, windows)[0].size * windows.kernel[0] * windows.kernel[1],
    traits=(Trait.MAX_POOL,),
    axes="nc..->nc..,nc..",
)
max_pool2d_put_p: Primitive = Primitive(
    "max_pool2d_put",
    lambda ct, where, windows, shape: ArrayType(shape, ct.dtype),
    _put_reference,
    [lambda out, ct, where, windows, shape: lambda u: bind(max_pool2d_pick_p, u, where, windows=windows)],
    lambda ct, where, windows, shape: ct.size,
    traits=(Trait.MAX_POOL_GRAD, Trait.LINEAR),
    axes="nc..,nc..->nc..",
)
max_pool2d_pick_p: Primitive = Primitive(
    "max_pool2d_pick",
    lambda x, where, windows: ArrayType(where.shape, x.dtype),
    _pick_reference,
    [lambda out, x, where, windows: partial(_put, where=where, windows=windows, shape=x.shape)],
    lambda x, where, windows: where.size,
    axes="nc..,nc..->nc..",
    traits=(Trait.LINEAR,),
)


def _avg_shape(x: Any, windows: Windows) -> ArrayType:
    require_float("avg_pool2d", x)
    return ArrayType(windows.output_shape("avg_pool2d", x.shape), x.dtype)


def _avg_reference(x: np.ndarray, windows: Windows) -> np.ndarray:
    out = windows.output_shape("avg_pool2d", x.shape)[2:]
    taps = windows.taps(windows.pad(x, 0), out)
    area = windows.kernel[0] * windows.kernel[1]
    total = next(taps).astype(x.dtype if area <= 64 else np.float64)  # small windows need no float64
    for view in taps:
        total += view
    return (total / total.dtype.type(area)).astype(x.dtype)


def _avg_put_reference(ct: np.ndarray, windows: Windows, shape: Sequence[int]) -> np.ndarray:
    share = ct / ct.dtype.type(windows.kernel[0] * windows.kernel[1])

    def fill(position: int, view: np.ndarray) -> None:
        view += share

    return windows.spread(shape, ct.dtype, ct.shape[2:], fill)


avg_pool2d_p: Primitive = Primitive(
    "avg_pool2d",
    _avg_shape,
    _avg_reference,
    [lambda out, x, windows: partial(bind, avg_pool2d_put_p, windows=windows, shape=x.shape)],
    lambda x, windows: _avg_shape(x, windows).size * windows.kernel[0] * windows.kernel[1],
    axes="nc..->nc..",
    traits=(Trait.LINEAR,),
)
avg_pool2d_put_p: Primitive = Primitive(
    "avg_pool2d_put",
    lambda ct, windows, shape: ArrayType(shape, ct.dtype),
    _avg_put_reference,
    [lambda out, ct, windows, shape: lambda u: bind(avg_pool2d_p, u, windows=windows)],
    lambda ct, windows, shape: ct.size * windows.kernel[0] * windows.kernel[1],
    axes="nc..->nc..",
    traits=(Trait.LINEAR,),
)


class AxisWindows(NamedTuple):
    """The windows along one axis.

    Attributes:
        length: elements of the axis.
        kernel: elements of a window.
        low, high: padding before and after the axis.
        outputs: number of windows.
    """

    length: int
    kernel: int
    stride: int
    low: int
    high: int
    dilation: int
    outputs: int

    @property
    def supported(self) -> bool:
        """Whether the primitives support it: equal padding, no dilation, no partial window at the end."""
        fits = self.length + 2 * self.low - self.kernel
        return self.low == self.high and self.dilation == 1 and self.outputs == fits // self.stride + 1

    def positions(self) -> np.ndarray:
        """Positions in the axis, (outputs, kernel). Those in the padding are negative, or at least ``length``."""
        starts = self.stride * np.arange(self.outputs) - self.low
        return starts[:, None] + self.dilation * np.arange(self.kernel)

    def positions_in_image(self) -> np.ndarray:
        """`positions`, with each one in the padding replaced by the nearest one of its window in the image.

        The maximum of the window, its first maximum and its last NaN stay the same.
        """
        at = self.positions()
        valid = (at >= 0) & (at < self.length)
        first = valid.argmax(1)
        last = self.kernel - 1 - valid[:, ::-1].argmax(1)
        return np.take_along_axis(at, np.clip(np.arange(self.kernel), first[:, None], last[:, None]), 1)

    def divisors(self, count_include_pad: bool) -> np.ndarray:
        """Number of elements of each window, with or without the padding. Elements past the padding never count."""
        at = self.positions()
        low, high = (-self.low, self.length + self.high) if count_include_pad else (0, self.length)
        return ((at >= low) & (at < high)).sum(1)


def single_elements(length: int) -> AxisWindows:
    """Windows of one element each."""
    return AxisWindows(length, 1, 1, 0, 0, 1, length)


def axis_windows(
    name: str, shape: Shape, kernel: Ints, stride: Ints | None, padding: Padding, dilation: Ints, ceil: bool
) -> list[AxisWindows]:
    """The windows along each axis of an image.

    Args:
        shape: (N, C, L), (N, C, H, W) or (N, C, D, H, W).
        ceil: keep a partial window at the end.

    Raises:
        OptionError: an option is out of its range, or the padding is more than half of the window.
        ShapeError: a window is larger than the padded image.
    """
    lengths, axes = shape[2:], len(shape) - 2
    kernels = per_axis(name, "kernel_size", kernel, axes)
    strides = kernels if stride is None else per_axis(name, "stride", stride, axes)
    dilations = per_axis(name, "dilation", dilation, axes)
    spans = tuple(d * (k - 1) + 1 for k, d in zip(kernels, dilations, strict=True))
    pads = paddings(name, padding, lengths, spans, strides)
    if any(max(p) > -(-k // 2) if padding == "same" else 2 * max(p) > k for p, k in zip(pads, spans, strict=True)):
        raise OptionError(f"{name}: padding is {shown(padding)}, expected at most half of the window {spans}")
    found = []
    for n, k, s, (low, high), d, span in zip(lengths, kernels, strides, pads, dilations, spans, strict=True):
        rest = n + low + high - span
        count = (-(-rest // s) if ceil else rest // s) + 1
        if ceil and (count - 1) * s >= n + low:  # a window may not start in the padding after the image
            count -= 1
        if n < 1 or count < 1:
            raise ShapeError(
                f"{name}: window {'x'.join(map(str, spans))} is larger than the input "
                f"{'x'.join(map(str, lengths))} with padding {padding}"
            )
        along = AxisWindows(n, k, s, low, high, d, count)
        if d > 1 and not along.divisors(count_include_pad=False).all():
            raise ShapeError(f"{name}: a window of dilation {d} lies in the padding alone; use less padding")
        found.append(along)
    return found


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
        ShapeError: the window is larger than the padded image. OptionError: the padding is more than half of the
            window, or an option has another value.
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


def adaptive_avg_pool2d(x: ArrayLike, output_size: int | Sequence[int]) -> Value:
    """Means over a grid of ``output_size`` nearly equal windows: row i spans i H / OH (down) to (i + 1) H / OH (up).

    Each axis is a matrix product with weights from `averages`.
    """
    value = as_value(x)
    if value.ndim != 4 or 0 in value.shape[2:]:
        raise ShapeError(f"adaptive_avg_pool2d: found shape {value.shape}, expected (N, C, H, W) with H, W > 0")
    rows, columns = per_axis("adaptive_avg_pool2d", "output_size", output_size, 2)
    if rows * columns >= LIMIT or max(rows * value.shape[2], columns * value.shape[3]) >= LIMIT:
        raise ShapeError(f"adaptive_avg_pool2d: output size {(rows, columns)} needs 2^31 elements or more")
    if rows == columns == 1:
        return mean(value, (2, 3), keepdims=True)
    left, right = (
        array(averages(length, count).astype(value.dtype), device=value.device)
        for length, count in zip(value.shape[2:], (rows, columns), strict=True)
    )
    with matmul_precision(FULL):  # as other means
        return matmul(left, matmul(value, right, transpose_b=True))


def averages(length: int, count: int) -> np.ndarray:
    """The matrix (count, length) of the means of ``count`` nearly equal windows: float64."""
    weights = np.zeros((count, length))
    for i in range(count):
        start, stop = i * length // count, -(-(i + 1) * length // count)
        weights[i, start:stop] = 1 / (stop - start)
    return weights
