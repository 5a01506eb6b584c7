"""Shapes as kernels take them, on every device."""

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
