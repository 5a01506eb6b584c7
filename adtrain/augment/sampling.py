"""Pixels by their place: each pixel of a new image says where in the old one it comes from.

This is the inverse mapping of M. Jaderberg et al., "Spatial transformer networks", NeurIPS 2015.
"""

from __future__ import annotations

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array


def grid(images: Value, dtype: np.typing.DTypeLike) -> tuple[Value, Value]:
    """The numbers of the rows, (1, H, 1), and of the columns, (1, 1, W), of images (N, C, H, W)."""
    rows, columns = (np.arange(n).astype(dtype) for n in images.shape[2:])
    return array(rows.reshape(1, -1, 1), device=images.device), array(columns.reshape(1, 1, -1), device=images.device)


def pixels_at(images: Value, rows: Value, columns: Value) -> Value:
    """Pixels (N, C, h, w) of images (N, C, H, W) at `rows` and `columns`, integers that broadcast to (N, h, w)."""
    count, channels, height, width = images.shape
    flat = ops.astype(rows * width + columns, np.uint32)  # unsigned: none of them counts from the end
    size = flat.shape[1] * flat.shape[2]
    index = ops.broadcast_to(ops.reshape(flat, (count, 1, size)), (count, channels, size))
    found = ops.take_along_axis(ops.reshape(images, (count, channels, height * width)), index, axis=2)
    return ops.reshape(found, (count, channels, *flat.shape[1:]))


def bilinear(images: Value, rows: Value, columns: Value) -> Value:
    """Images (N, C, H, W) at real `rows` and `columns` (N, H, W), between the four nearest pixels; outside is 0."""
    height, width = images.shape[2:]
    padded = ops.pad(images, ((0, 0), (0, 0), (1, 2), (1, 2)))
    (y, down), (x, right) = _cell(rows, height), _cell(columns, width)
    above, below = (_between(pixels_at(padded, at, x), pixels_at(padded, at, x + 1), right) for at in (y, y + 1))
    return _between(above, below, down)


def _cell(positions: Value, length: int) -> tuple[Value, Value]:
    """The pixel before each position, in a line with one 0 in front and two behind, and how far behind it that is.

    The pixels are int32 (N, H, W), the distances (N, 1, H, W), in [0, 1). Positions a pixel or more outside are alike.
    """
    inside = ops.clip(positions, -1.0, float(length)) + 1.0
    first = ops.astype(inside, np.int32)
    return first, ops.expand_dims(inside - ops.astype(first, inside.dtype), 1)


def _between(a: Value, b: Value, part: Value) -> Value:
    return a + (b - a) * part
