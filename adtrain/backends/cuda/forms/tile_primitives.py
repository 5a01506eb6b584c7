"""The primitives `weight_tiles` and `with_tiles`: weights as tiles of bfloat16 terms, which bulk copies read.

The pass `tile_weights` makes their equations for products of many rows. It runs after differentiation, so they
have no derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.axes import whole
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.types import ArrayType

TILE, TERMS, CHUNK = 64, 3, 8
"""Rows and columns of a tile; terms of a number; neighbours that the swizzle keeps together."""
GROUP = 16
"""The rows or columns that are permuted together."""
ORDER = np.arange(GROUP).reshape(4, 2, 2).swapaxes(0, 1).ravel()
"""The permuted order of a group: an accumulator of WGMMA has pairs of columns, eight columns apart; see
`kernels/cuda/gemm/tile_products.cuh`."""


def _type(weights: Any) -> ArrayType:
    if weights.dtype != np.float32:
        raise DTypeError(f"weight_tiles: found {weights.dtype}, expected float32")
    if len(weights.shape) != 2 or any(length % TILE for length in weights.shape):
        raise ShapeError(f"weight_tiles: found shape {weights.shape}, expected two multiples of {TILE}")
    rows, columns = (length // TILE for length in weights.shape)
    return ArrayType((rows, columns, TERMS, TILE, TILE), np.dtype(np.uint16))


def _tiles(weights: np.ndarray, permuted: int) -> np.ndarray:
    rows, columns = (length // TILE for length in weights.shape)
    order = np.arange(weights.shape[permuted]).reshape(-1, GROUP)[:, ORDER].ravel()
    rest, terms = np.take(weights, order, permuted), []
    rounded, value = PRIMITIVES["to_bfloat16"].reference, PRIMITIVES["from_bfloat16"].reference
    with np.errstate(invalid="ignore"):
        for _ in range(TERMS):
            terms.append(rounded(rest))
            rest = rest - value(terms[-1])
    chunks = np.stack(terms).reshape(TERMS, rows, TILE, columns, TILE // CHUNK, CHUNK).transpose(1, 3, 0, 2, 4, 5)
    row = np.arange(TILE)[:, np.newaxis]
    tiles = chunks[:, :, :, row, np.arange(TILE // CHUNK) ^ row % CHUNK]
    return tiles.reshape(rows, columns, TERMS, TILE, TILE)


def _reference(*weights: np.ndarray, permuted: Sequence[int]) -> Any:
    found = tuple(map(_tiles, weights, permuted))
    return found if len(found) > 1 else found[0]


weight_tiles_p = Primitive(
    "weight_tiles",
    lambda *weights, permuted: tuple(map(_type, weights)),
    _reference,
    axes=lambda *weights, permuted: whole([2] * len(weights), [5] * len(weights)),
)
"""(weights, ...; permuted): each matrix of weights in tiles of 64 x 64. A weight is the sum of three bfloat16 terms. A
tile has the bits of its first terms, then of the second ones, then of the third ones, in rows with the 128-byte swizzle
of WGMMA. Along the matrix's axis in `permuted` groups of 16 have the order ORDER."""

with_tiles_p = Primitive(
    "with_tiles",
    lambda weights, tiles: ArrayType(weights.shape, weights.dtype),
    lambda weights, tiles: weights,
    view=True,
    axes="mn,.....->mn",
)
"""(weights, tiles): the weights. A kernel reads their tiles."""
