"""Multiresolution hash encoding of points (T. Müller et al., "Instant neural graphics primitives", 2022).

A level divides the unit box [0, 1]^d into resolution^d cells. Each corner of a cell has a row of the table, and a point
gets the rows of the 2^d corners of its cell, interpolated. If a level has more corners than `table_size`, several share
a row: a hash of the corner's position chooses it.

With ``along``, the weights of the corners are differentiated by the position in the cell along these coordinates. They
are linear in each coordinate. So the two primitives are closed under differentiation, whatever the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from adtrain.core.array import Value, array
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.common import ArrayLike, as_value, integers, reshape
from adtrain.ops.create import zeros
from adtrain.ops.elementwise import astype
from adtrain.ops.reduce import sum
from adtrain.ops.shape import stack

__all__ = ["hash_grid"]

PRIMES = (1, 2_654_435_761, 805_459_861, 3_674_653_429)
"""Factors of the hash, one for each coordinate; the first three are those of the paper."""
MOST_COORDINATES = len(PRIMES)
MOST_RESOLUTION = 1 << 24
"""The largest resolution of a level: float32 has 24 bits, which distinguish this number of cells."""


def grid_levels(coordinates: int, resolutions: Sequence[int], table_size: int) -> tuple[np.ndarray, int]:
    """The levels, int64 (L, 3), and the number of rows of their table.

    A level is its resolution, its first row, and a mask: the number of its rows minus 1 if they are chosen by a hash,
    and 0 if each corner has its own.

    Raises:
        ShapeError: there are too few or too many coordinates, a resolution is too small or too large, or the table size
            is not a power of two.
    """
    if not 1 <= coordinates <= MOST_COORDINATES:
        raise ShapeError(f"hash_grid: found points of {coordinates} coordinates, expected 1 to {MOST_COORDINATES}")
    if not resolutions or not all(1 <= n <= MOST_RESOLUTION for n in resolutions):
        raise ShapeError(f"hash_grid: found resolutions {list(resolutions)}, expected some from 1 to {MOST_RESOLUTION}")
    if table_size < 2 or table_size & (table_size - 1) or table_size > 1 << 32:
        raise ShapeError(f"hash_grid: found table_size {table_size}, expected a power of two from 2 to 2^32")
    levels, rows = [], 0
    for resolution in resolutions:
        corners = (resolution + 1) ** coordinates
        levels.append((resolution, rows, 0 if corners <= table_size else table_size - 1))
        rows += min(corners, table_size)
    return np.array(levels, np.int64), rows


@checked_options
def hash_grid(points: ArrayLike, table: ArrayLike, resolutions: Sequence[int], table_size: int) -> Value:
    """The features of points (N, d) in all L levels, (N, L * F), from a table (rows, F); d is at most 4.

    A level is a grid of `resolutions[l]` cells along each axis, and has at most `table_size` rows of the table. A point
    outside [0, 1]^d has the features of the nearest point of the box.

    Raises:
        ShapeError: points or table have another number of axes, the table has another number of rows than these
            levels need, or one of the errors of `grid_levels`.
        DTypeError: points and table are not of one floating-point type.
    """
    x = as_value(points)
    rows = as_value(table)
    if x.ndim != 2 or rows.ndim != 2:
        raise ShapeError(f"hash_grid: found shapes {x.shape} and {rows.shape}, expected points (N, d), table (rows, F)")
    levels, expected = grid_levels(x.shape[1], integers("hash_grid", "resolutions", resolutions), table_size)
    if rows.shape[0] != expected:
        raise ShapeError(f"hash_grid: found a table of {rows.shape[0]} rows, expected {expected} for these levels")
    if x.dtype.kind != "f" or x.dtype != rows.dtype:
        raise DTypeError(f"hash_grid: found {x.dtype} and {rows.dtype}, expected one floating-point type")
    features = bind(hash_grid_p, x, rows, array(levels, device=x.device), along=())
    return reshape(features, (x.shape[0], len(levels) * rows.shape[1]))


def _corners(points: np.ndarray, level: np.ndarray, along: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the corners of each point's cell, int64 (2^d, N), and their weights (2^d, N)."""
    resolution, first, mask = map(int, level)
    position = points * np.asarray(resolution, points.dtype)
    cell = np.fmin(np.fmax(np.floor(position), 0), resolution - 1)
    fraction = np.clip(position, 0, resolution) - cell
    slope = ((position >= 0) & (position <= resolution)).astype(points.dtype)
    rows, weights = [], []
    for corner in product((0, 1), repeat=points.shape[1]):
        at = cell.astype(np.int64) + corner
        if mask:
            row = np.bitwise_xor.reduce(at * np.array(PRIMES[: len(corner)]) & 0xFFFFFFFF, axis=1) & mask
        else:
            row = at @ np.array([(resolution + 1) ** i for i in range(len(corner))])
        factors = [
            (slope if end else -slope)[:, i] if i in along else (fraction if end else 1 - fraction)[:, i]
            for i, end in enumerate(corner)
        ]
        rows.append(first + row)
        weights.append(prod(factors[1:], start=factors[0]))
    return np.array(rows), np.array(weights)


def _reference(points: np.ndarray, table: np.ndarray, levels: np.ndarray, along: tuple[int, ...]) -> np.ndarray:
    found = [np.einsum("cn,cnf->nf", weights, table[rows]) for rows, weights in _each(points, levels, along)]
    return np.stack(found, axis=1)


def _add_reference(
    ct: np.ndarray, points: np.ndarray, levels: np.ndarray, rows: int, along: tuple[int, ...]
) -> np.ndarray:
    out = np.zeros((rows, ct.shape[2]))
    for i, (places, weights) in enumerate(_each(points, levels, along)):
        np.add.at(out, places, weights[:, :, np.newaxis] * ct[:, i])
    return out.astype(ct.dtype)


def _each(points: np.ndarray, levels: np.ndarray, along: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [_corners(points, level, along) for level in levels]


def _by_points(ct: Value, points: Value, table: Value, levels: Value, along: tuple[int, ...]) -> Value:
    """The cotangent of the points, for the cotangent ``ct`` (N, L, F) of their features."""
    cells = reshape(astype(levels[:, 0], ct.dtype), (-1, 1))
    columns = []
    for i in range(points.shape[1]):
        if i in along:
            columns.append(zeros((points.shape[0],), points.dtype, points.device))
        else:
            slopes = bind(hash_grid_p, points, table, levels, along=tuple(sorted((*along, i))))
            columns.append(sum(ct * slopes * cells, (1, 2)))
    return stack(columns, axis=1)


def _flops(x: Any, points: Any, levels: Any, along: Any, rows: int = 0) -> int:
    features = x.shape[-1]
    return int(points.shape[0] * levels.shape[0] * 2 ** points.shape[1] * (2 * features + points.shape[1]))


hash_grid_p: Primitive = Primitive(
    "hash_grid",
    lambda points, table, levels, along: ArrayType((points.shape[0], levels.shape[0], table.shape[1]), table.dtype),
    _reference,
    [
        lambda out, points, table, levels, along: lambda ct: _by_points(ct, points, table, levels, along),
        lambda out, points, table, levels, along: (
            lambda ct: bind(hash_grid_add_p, ct, points, levels, rows=table.shape[0], along=along)
        ),
    ],
    lambda points, table, levels, along: _flops(table, points, levels, along),
    reads=lambda points, table, levels, along: (
        points.size,
        points.shape[0] * levels.shape[0] * 2 ** points.shape[1] * table.shape[1],
        levels.size,
    ),
    axes="n.,.f,l.->nlf",
)
hash_grid_add_p: Primitive = Primitive(
    "hash_grid_add",
    lambda ct, points, levels, rows, along: ArrayType((rows, ct.shape[2]), ct.dtype),
    _add_reference,
    [
        lambda out, ct, points, levels, rows, along: lambda u: bind(hash_grid_p, points, u, levels, along=along),
        lambda out, ct, points, levels, rows, along: lambda u: _by_points(ct, points, u, levels, along),
    ],
    _flops,
    axes="nlf,n.,l.->.f",
)
