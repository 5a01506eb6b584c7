"""Shapes as kernels take them, on every device: lengths, strides, and the strided copies of `transpose`, `flip`,
`concatenate`, `slice` and `pad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.primitive import PRIMITIVES
from adtrain.core.types import BITS, ArrayType, Shape


def output_type(primitive: str, *types: Any, **params: Any) -> ArrayType:
    """The type of a primitive's only output, from its shape rule."""
    (found,) = PRIMITIVES[primitive].output_types(types, params)
    return found


def split_at(shape: Shape, axis: int) -> tuple[int, int, int]:
    """A shape as three lengths: before ``axis``, along it, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def alternating(shape: Shape, axes: Sequence[int], count: int) -> tuple[int, ...]:
    """A shape as ``count`` lengths, of kept and reduced axes in turn. The last length is of reduced axes.

    Raises:
        NotImplementedError: kept and reduced axes alternate more than ``count`` times.
    """
    lengths = [1]  # from the last axis
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] != 1:
            if (i in axes) != (len(lengths) % 2 == 1):
                lengths.append(1)
            lengths[-1] *= shape[i]
    if len(lengths) > count:
        raise NotImplementedError(f"a reduction of shape {shape} over axes {tuple(axes)}")
    return (*[1] * (count - len(lengths)), *reversed(lengths))


def element_types(dtype: np.dtype) -> tuple[np.dtype, np.dtype]:
    """T and U of kernels whose arrays may be bfloat16: the types of arithmetic, and of elements in memory."""
    return (np.dtype(np.float32) if dtype == BITS else dtype), dtype


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """The strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def product_lengths(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> tuple[int, int, int, int]:
    """Batch, M, N and K of a matrix product."""
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    return math.prod(a.shape[:-2]), m, b.shape[-2 if transpose_b else -1], k


class RecurrentLengths(NamedTuple):
    """Rows of the batch, steps, hidden units, and sums of a step: gates times hidden units."""

    rows: int
    length: int
    hidden: int
    sums: int


def recurrent_lengths(first: Any, weight: Any, *others: Any, **params: Any) -> RecurrentLengths:
    """The lengths of a recurrent primitive, or of its gradient."""
    (rows, length, _), (sums, hidden) = next(x.shape for x in (first, *others) if len(x.shape) == 3), weight.shape
    return RecurrentLengths(rows, length, hidden, sums)


RECURRENT = {"rnn_tanh": 4, "rnn_relu": 4, "lstm": 8, "gru": 5}
"""The recurrent primitives, and the number of arguments of their gradients without the last one, which is optional."""


def reads_all_cotangents(cell: str, types: Sequence[Any]) -> bool:
    """Whether the gradient of a cell has the cotangent of all hidden states as its last argument."""
    return len(types) > RECURRENT[cell]


def optional_arguments(*types: Any) -> list[str]:
    """Which optional arguments there are among those of `attention` or its gradient: "mask", "starts", "rng"."""
    named = {"mask": "b", "starts": "i", "rng": "u"}
    return [name for name, kind in named.items() if any(x.dtype.kind == kind for x in types)]


class AttentionLengths(NamedTuple):
    """The heads of all examples, heads of an example, queries, keys, and the width of a head. Elements between two
    queries or keys in memory (row), and between two rows of the output (out_row)."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    row: int
    out_row: int


def attention_lengths(first: Any, *others: Any, heads: int = 0, **params: Any) -> AttentionLengths:
    """The lengths of `attention` of q, k, v, or with ``heads`` of `self_attention`; or of a gradient."""
    *leading, length, row = first.shape
    batch = math.prod(leading)
    if heads:
        return AttentionLengths(batch * heads, heads, length, length, row // (3 * heads), row, row // 3)
    return AttentionLengths(batch, 1, length, others[0].shape[-2], row, row, row)


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
