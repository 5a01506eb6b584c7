"""Max and average pooling over one, two or three axes: compositions of the primitives for two axes.

The largest element of a box is the largest of its planes' largest elements, and means and divisors are products over
axes too. So pooling over three axes pools rows and columns, then depths.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.trace import bind
from adtrain.ops.broadcasting import reshape
from adtrain.ops.common import ArrayLike, as_value, require_float
from adtrain.ops.elementwise import add, mul
from adtrain.ops.index import take, take_along_axis
from adtrain.ops.pool import Windows, avg_pool2d_p, max_pool2d_p
from adtrain.ops.reduce import argmax
from adtrain.ops.shape import transpose
from adtrain.ops.windows import Ints, Padding, each, pad_image, paddings


class Sweep(NamedTuple):
    """How a window moves along one axis, and the number of its positions."""

    length: int
    kernel: int
    stride: int
    low: int
    high: int
    dilation: int
    places: int

    @property
    def plain(self) -> bool:
        """The primitives can do it: equal padding, no dilation, no partial window at the end."""
        fits = self.length + 2 * self.low - self.kernel
        return self.low == self.high and self.dilation == 1 and self.places == fits // self.stride + 1

    def positions(self) -> np.ndarray:
        """Positions in the axis, (windows, elements of a window); some are in the padding."""
        starts = self.stride * np.arange(self.places) - self.low
        return starts[:, None] + self.dilation * np.arange(self.kernel)

    def inside(self) -> np.ndarray:
        """`positions` where those in the padding are replaced by the window's nearest one in the image.

        A maximum stays the same. Of equal elements the first stays the first, and of NaN the last stays the last.
        """
        at = self.positions()
        valid = (at >= 0) & (at < self.length)
        first = valid.argmax(1)
        last = self.kernel - 1 - valid[:, ::-1].argmax(1)
        return np.take_along_axis(at, np.clip(np.arange(self.kernel), first[:, None], last[:, None]), 1)

    def divisors(self, count_include_pad: bool) -> np.ndarray:
        """Elements of each window, with the padding or without. Elements past the padding never count."""
        at = self.positions()
        low, high = (-self.low, self.length + self.high) if count_include_pad else (0, self.length)
        return ((at >= low) & (at < high)).sum(1)


ONE = Sweep(1, 1, 1, 0, 0, 1, 1)


def _sweeps(
    name: str, axes: int, x: Value, kernel: Ints, stride: Ints | None, padding: Padding, dilation: Ints, ceil: bool
) -> list[Sweep]:
    if x.ndim != axes + 2:
        raise ShapeError(f"{name}: found shape {x.shape}, expected (N, C{', D, H, W'[9 - 3 * axes :]})")
    lengths = x.shape[2:]
    kernels = each(name, "kernel_size", kernel, axes)
    strides = kernels if stride is None else each(name, "stride", stride, axes)
    dilations = each(name, "dilation", dilation, axes)
    if min(*kernels, *strides, *dilations) < 1:
        raise ShapeError(f"{name}: window {kernels}, stride {strides} and dilation {dilations} must be at least 1")
    spans = tuple(d * (k - 1) + 1 for k, d in zip(kernels, dilations, strict=True))
    pads = paddings(name, padding, lengths, spans, strides)
    if any(max(p) > -(-k // 2) if padding == "same" else 2 * max(p) > k for p, k in zip(pads, spans, strict=True)):
        raise ShapeError(f"{name}: padding {padding} must be between 0 and half the window {spans}")
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
        sweep = Sweep(n, k, s, low, high, d, count)
        if d > 1 and not _touches_image(sweep):
            raise ShapeError(f"{name}: a window of dilation {d} lies in the padding alone; use less padding")
        found.append(sweep)
    return found


def _touches_image(sweep: Sweep) -> bool:
    at = sweep.positions()
    return bool(((at >= 0) & (at < sweep.length)).any(1).all())


def _windows(rows: Sweep, columns: Sweep) -> Windows:
    return Windows((rows.kernel, columns.kernel), (rows.stride, columns.stride), (rows.low, columns.low))


def _constant(numbers: np.ndarray, like: Value) -> Value:
    return array(numbers, device=like.device)


def _max(x: Value, rows: Sweep, columns: Sweep) -> tuple[Value, Value]:
    """Maxima of (N, C, H, W), and their positions in the window."""
    floating = x.dtype.kind == "f"
    if floating and rows.plain and columns.plain:
        maxima, where = bind(max_pool2d_p, x, windows=_windows(rows, columns))
        return maxima, where
    for axis, sweep in ((2, rows), (3, columns)):
        if sweep.kernel > 1 or sweep.places != sweep.length:
            x = take(x, _constant(sweep.inside().ravel(), x), axis)
    kernel = (rows.kernel, columns.kernel)
    if floating:
        maxima, where = bind(max_pool2d_p, x, windows=Windows(kernel, kernel, (0, 0)))
        return maxima, where
    n, c = x.shape[:2]
    split = reshape(x, (n, c, rows.places, rows.kernel, columns.places, columns.kernel))
    windows = reshape(transpose(split, (0, 1, 2, 4, 3, 5)), (n, c, rows.places, columns.places, prod(kernel)))
    where = argmax(windows, -1, keepdims=True)
    return reshape(take_along_axis(windows, where, -1), where.shape[:-1]), reshape(where, where.shape[:-1])


def _flat(where: Value, rows: Sweep, columns: Sweep) -> Value:
    """Positions in windows as flat positions in the image (H, W), int64."""
    taps = np.arange(rows.kernel * columns.kernel)
    starts = (np.arange(rows.places) * rows.kernel)[:, None], (np.arange(columns.places) * columns.kernel)[None]
    parts = []
    for tap, start, at in (
        (taps // columns.kernel, starts[0], rows.inside() * columns.length),
        (taps % columns.kernel, starts[1], columns.inside()),
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
    sweeps = _sweeps(name, axes, value, kernel, stride, padding, dilation, ceil)
    batch, rows, columns = value.shape[:2], sweeps[-2] if axes > 1 else ONE, sweeps[-1]
    shape = (*batch, *(sweep.places for sweep in sweeps))
    depth = sweeps[0].length if axes == 3 else 1
    images = value if axes == 2 else reshape(value, (batch[0], batch[1] * depth, rows.length, columns.length))
    maxima, where = _max(images, rows, columns)
    flat = _flat(where, rows, columns) if indices else None
    if axes == 3:
        count = rows.places * columns.places
        points = Sweep(count, 1, 1, 0, 0, 1, count)
        maxima, where = _max(reshape(maxima, (*batch, depth, count)), sweeps[0], points)
        if flat is not None:
            planes = _constant((np.arange(depth) * (rows.length * columns.length))[:, None], flat)
            flat = reshape(add(reshape(flat, (*batch, depth, count)), planes), (*batch, depth * count))
            flat = take_along_axis(flat, reshape(_flat(where, sweeps[0], points), (*batch, -1)), 2)
    maxima = reshape(maxima, shape)
    return maxima if flat is None else (maxima, reshape(flat, shape))


def _mean(x: Value, rows: Sweep, columns: Sweep) -> Value:
    """Sums over windows of (N, C, H, W), divided by the sizes of the windows."""
    if rows.plain and columns.plain:
        return bind(avg_pool2d_p, x, windows=_windows(rows, columns))
    needed = [(s.low, max((s.places - 1) * s.stride + s.kernel - s.low - s.length, 0)) for s in (rows, columns)]
    bare = [s._replace(low=0, high=0) for s in (rows, columns)]
    return bind(avg_pool2d_p, pad_image(x, tuple(needed)), windows=_windows(*bare))


def _avg_pool(
    axes: int, x: ArrayLike, kernel: Ints, stride: Any, padding: Padding, ceil: bool, include: bool, divisor: int | None
) -> Value:
    name, value = f"avg_pool{axes}d", as_value(x)
    require_float(name, value)
    sweeps = _sweeps(name, axes, value, kernel, stride, padding, 1, ceil)
    if divisor is not None and (not isinstance(divisor, (int, np.integer)) or isinstance(divisor, bool) or not divisor):
        raise ShapeError(f"{name}: divisor_override: found {divisor}, expected an integer other than 0")
    batch, rows, columns = value.shape[:2], sweeps[-2] if axes > 1 else ONE, sweeps[-1]
    depth = sweeps[0].length if axes == 3 else 1
    images = value if axes == 2 else reshape(value, (batch[0], batch[1] * depth, rows.length, columns.length))
    out = _mean(images, rows, columns)
    if axes == 3:
        count = rows.places * columns.places
        out = _mean(reshape(out, (*batch, depth, count)), sweeps[0], Sweep(count, 1, 1, 0, 0, 1, count))
    out = reshape(out, (*batch, *(sweep.places for sweep in sweeps)))
    factor = np.array(prod(s.kernel for s in sweeps), np.float64)
    if divisor is not None:
        factor = factor / divisor
    else:
        for axis, sweep in enumerate(sweeps):
            factor = factor / sweep.divisors(include).reshape((-1,) + (1,) * (axes - 1 - axis))
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
        padding: elements of -infinity on each side, at most half the window: a number, one per axis, a pair (before,
            after) per axis, "valid" (none) or "same" (OH is H / stride, rounded up).
        dilation: the distance of the elements of a window.
        ceil_mode: keep a partial window at the end, if it starts in the image or in the padding before it.
        return_indices: return the flat positions of the maxima in the image too, int64.

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
        count_include_pad: zeros of the padding count as elements.
        divisor_override: the number that sums are divided by, instead of the number of elements.
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
