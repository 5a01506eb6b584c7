"""Primitives of max and average pooling over two axes, and adaptive pooling. pool_functions has the other operations.

Max pooling returns the position of each maximum too. max_pool2d_pick gathers from these positions, max_pool2d_put
scatters to them: they are transposes, and the derivatives of max pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.core.precision import FULL, matmul_precision
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.ops.common import ArrayLike, as_value, require_float
from adtrain.ops.matmul import matmul
from adtrain.ops.reduce import mean
from adtrain.ops.windows import LIMIT, per_axis

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
