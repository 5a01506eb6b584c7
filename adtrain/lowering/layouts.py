"""Transpose, flip, concatenate, slice and pad as strided copies; the lengths that indexing kernels take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from adtrain.lowering.shapes import contiguous_strides, output_type, split_at

Ints = tuple[int, ...]


class Layout(NamedTuple):
    """A copy of ``lengths`` elements along each axis. Strides and offsets are in elements."""

    lengths: Sequence[int]
    source_strides: Sequence[int]
    target_strides: Sequence[int]
    source_offset: int = 0
    target_offset: int = 0


def transpose(x: Any, axes: Ints) -> Layout:
    lengths, strides = tuple(x.shape[i] for i in axes), contiguous_strides(x.shape)
    return Layout(lengths, [strides[i] for i in axes], contiguous_strides(lengths))


def flip(x: Any, axes: Ints) -> Layout:
    strides = contiguous_strides(x.shape)
    start = sum((x.shape[i] - 1) * strides[i] for i in axes)
    return Layout(x.shape, [-s if i in axes else s for i, s in enumerate(strides)], strides, start)


def concatenate(position: int, *xs: Any, axis: int) -> Layout:
    """The copy of argument ``position``."""
    x, strides = xs[position], contiguous_strides(output_type("concatenate", *xs, axis=axis).shape)
    start = sum(x.shape[axis] for x in xs[:position]) * strides[axis]
    return Layout(x.shape, contiguous_strides(x.shape), strides, 0, start)


def slice(x: Any, starts: Ints, stops: Ints, steps: Ints) -> Layout:
    ends = [min(n, stop) for n, stop in zip(x.shape, stops, strict=True)]  # x may be one item of a larger array
    lengths = tuple(len(range(*span)) for span in zip(starts, ends, steps, strict=True))
    strides = contiguous_strides(x.shape)
    start = sum(a * s for a, s in zip(starts, strides, strict=True))
    return Layout(
        lengths, [s * step for s, step in zip(strides, steps, strict=True)], contiguous_strides(lengths), start
    )


def pad(x: Any, low: Ints, high: Ints, gaps: Ints, value: float) -> Layout:
    """The copy of ``x`` into the padded array."""
    strides = contiguous_strides(output_type("pad", x, low=low, high=high, gaps=gaps, value=value).shape)
    start = sum(a * s for a, s in zip(low, strides, strict=True))
    targets = [s * (gap + 1) for s, gap in zip(strides, gaps, strict=True)]
    return Layout(x.shape, contiguous_strides(x.shape), targets, 0, start)


Lengths = tuple[int, int, int, int]


def take(x: Any, indices: Any, axis: int) -> Lengths:
    return *split_at(x.shape, axis), math.prod(indices.shape)


def scatter_add(ct: Any, indices: Any, axis: int, length: int) -> Lengths:
    inner = ct.shape[axis + len(indices.shape) :]
    return math.prod(ct.shape[:axis]), length, math.prod(inner), math.prod(indices.shape)


def take_along_axis(x: Any, indices: Any, axis: int) -> Lengths:
    return _along_axis(indices, x.shape[axis], axis)


def scatter_along_axis(ct: Any, indices: Any, axis: int, length: int) -> Lengths:
    return _along_axis(indices, length, axis)


def put_rows(x: Any, rows: Any, positions: Any, axis: int) -> Lengths:
    """Samples, other axes before ``axis``, its length, and axes after it."""
    outer, length, inner = split_at(x.shape, axis)
    return x.shape[0], outer // max(x.shape[0], 1), length, inner


def _along_axis(indices: Any, length: int, axis: int) -> Lengths:
    outer, count, inner = split_at(indices.shape, axis)
    return outer, length, inner, count


def axis_bits(axes: Ints) -> int:
    """Axes as the bits of a number."""
    return sum(1 << i for i in axes)


def hash_grid(points: Any, table: Any, levels: Any, along: Ints) -> Ints:
    """Points, coordinates, levels, features, and the coordinates of derivatives as bits."""
    return (*points.shape, levels.shape[0], table.shape[1], axis_bits(along))


def hash_grid_add(ct: Any, points: Any, levels: Any, rows: int, along: Ints) -> Ints:
    """The numbers of `hash_grid`, and the rows of the table."""
    return (*points.shape, *ct.shape[1:], axis_bits(along), rows)
