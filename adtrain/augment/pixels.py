"""Pixels of images at given positions."""

from __future__ import annotations

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array


def grid(images: Value, dtype: np.typing.DTypeLike) -> tuple[Value, Value]:
    """Row indices (1, H, 1) and column indices (1, 1, W) of images (N, C, H, W)."""
    rows, columns = (np.arange(n).astype(dtype) for n in images.shape[2:])
    return array(rows.reshape(1, -1, 1), device=images.device), array(columns.reshape(1, 1, -1), device=images.device)


def pixels_at(images: Value, rows: Value, columns: Value) -> Value:
    """Pixels (N, C, h, w) of images (N, C, H, W) at `rows` and `columns`, integers that broadcast to (N, h, w)."""
    count, channels, height, width = images.shape
    flat = ops.astype(rows * width + columns, np.uint32)  # unsigned, so that no index counts from the end
    size = flat.shape[1] * flat.shape[2]
    index = ops.broadcast_to(ops.reshape(flat, (count, 1, size)), (count, channels, size))
    found = ops.take_along_axis(ops.reshape(images, (count, channels, height * width)), index, axis=2)
    return ops.reshape(found, (count, channels, *flat.shape[1:]))


def bilinear(images: Value, rows: Value, columns: Value) -> Value:
    """Images (N, C, H, W) at real positions `rows`, `columns` (N, H, W), bilinearly interpolated; outside is 0.

    Source: M. Jaderberg et al., "Spatial transformer networks", NeurIPS 2015.
    """
    height, width = images.shape[2:]
    padded = ops.pad(images, ((0, 0), (0, 0), (1, 2), (1, 2)))
    (y, down), (x, right) = _cell(rows, height), _cell(columns, width)
    return interpolated(padded, (y, y + 1), (x, x + 1), down, right)


def interpolated(
    images: Value, rows: tuple[Value, Value], columns: tuple[Value, Value], down: Value, right: Value
) -> Value:
    """Between four pixels of images (N, C, H, W), which are in the two rows and the two columns: (N, C, h, w).

    The result is at the fraction `down` of the way from the first row to the second one, and `right` between columns.
    """
    above, below = (
        _lerp(pixels_at(images, row, columns[0]), pixels_at(images, row, columns[1]), right) for row in rows
    )
    return _lerp(above, below, down)


def reflected(positions: Value, length: int) -> Value:
    """Integers from -(length - 1) to 2 (length - 1) as positions of an axis, which is mirrored at its first and last
    pixel, as by `numpy.pad` in the mode "reflect"."""
    last = length - 1
    return last - ops.abs(last - ops.abs(positions))


def _cell(positions: Value, length: int) -> tuple[Value, Value]:
    """Split positions along an axis of `length` pixels into a pixel index and a fraction.

    The index, int32 (N, H, W), counts in the axis padded by one 0 in front and two behind. The fraction is (N, 1, H, W)
    in [0, 1). Positions more than a pixel outside are clamped.
    """
    inside = ops.clip(positions, -1.0, float(length)) + 1.0
    first = ops.astype(inside, np.int32)
    return first, ops.expand_dims(inside - ops.astype(first, inside.dtype), 1)


def _lerp(a: Value, b: Value, fraction: Value) -> Value:
    return a + (b - a) * fraction
