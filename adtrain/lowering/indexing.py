"""The lengths that kernels of indexing primitives take: outer, length of the indexed axis, inner, number of indices."""

from __future__ import annotations

import math
from typing import Any

from adtrain.lowering.shapes import split_at

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


def _along_axis(indices: Any, length: int, axis: int) -> Lengths:
    outer, count, inner = split_at(indices.shape, axis)
    return outer, length, inner, count
