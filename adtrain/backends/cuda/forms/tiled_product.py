"""Products of many rows with weights in tiles; the primitives `weight_tiles` and `with_tiles`.

A thread block computes 128 rows and some of the columns. Bulk copies fetch tiles of weights that are already split
into bfloat16 terms, in the layout that WGMMA reads. The pass `tile_weights` makes the equations of the primitives. It
runs after differentiation, so they have no derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel, part_names
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.horizontal import is_product
from adtrain.core.axes import whole
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.kernel import Target
from adtrain.core.precision import FULL
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, body_of
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


TILED_PRODUCT = "tiled_product"
"""A `with_tiles` equation, and a matrix product of its weights with an elementwise epilogue."""

ROWS = 128
"""Rows of a block."""
MIN_UTILIZATION = 0.65
"""Minimum share of the multiprocessors that have a block, on average over waves. It is an estimate: from this share on,
tiles should be faster than `gemm_bf16x3`, and one kernel of two products faster than two. Only one share was measured:
at 0.97 the kernel of two products takes 0.62 of the time of two kernels."""
STAGES = 4
"""Tiles of weights in the shared memory of a block."""
BARRIERS = 256
"""Bytes for the barriers in shared memory."""
MAX_LENGTH = 512
"""Maximum K and columns. Longer products are faster in fp16x2."""


@dataclass(frozen=True)
class TiledProduct:
    """The product in a `tiled_product` equation, whose second operand has tiles."""

    product: Equation

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Rows, K and columns."""
        matmul = matmul_of(self.product)
        return *matmul.inputs[0].type.shape, matmul.outputs[0].type.shape[1]  # type: ignore[return-value]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: tiles of weights, and barriers."""
        return STAGES * TERMS * TILE * TILE * 2 + BARRIERS

    def column_splits(self, target: Target) -> int:
        """The number of blocks that divide the columns of the same rows, for the least time on `target`."""
        tiles = self.lengths[2] // TILE
        divisors = [splits for splits in range(1, tiles + 1) if tiles % splits == 0]
        return min(divisors, key=lambda splits: (_waves(self.lengths[0] // ROWS * splits, target) / splits, splits))

    def fits(self, target: Target) -> bool:
        rows, inputs, columns = self.lengths
        if rows % ROWS or inputs % TILE or columns % TILE:
            return False
        if min(rows, inputs, columns) == 0 or max(inputs, columns) > MAX_LENGTH:
            return False
        return fills(rows // ROWS * self.column_splits(target), target)


def fills(blocks: int, target: Target) -> bool:
    """Whether so many blocks, at most one on a multiprocessor at a time, use enough of the device."""
    return blocks >= MIN_UTILIZATION * _waves(blocks, target) * target.multiprocessors


def _waves(blocks: int, target: Target) -> int:
    return -(-blocks // target.multiprocessors)


def tiled_product_of(equation: Equation) -> TiledProduct:
    """The product in a `tiled_product` equation."""
    _, product = body_of(equation).equations
    return TiledProduct(product)


def is_float32_product(equation: Equation) -> bool:
    """Whether it is a product of float32 matrices in full precision. The first matrix is not transposed."""
    if not is_product(equation):
        return False
    matmul = matmul_of(equation)
    supported = matmul.params["precision"] == FULL and not matmul.params["transpose_a"]
    matrices = all(v.type.dtype.name == "float32" and len(v.type.shape) == 2 for v in (*matmul.inputs, *matmul.outputs))
    return supported and matrices


THREADS = 384
"""Threads of a block: two warpgroups multiply, one copies."""


def tiled_product(equation: Equation, target: Target) -> Kernel:
    """The kernel of a `tiled_product` equation."""
    body, tiled = body_of(equation), tiled_product_of(equation)
    (rows, inputs, columns), splits = tiled.lengths, tiled.column_splits(target)
    matmul, (with_tiles, _) = matmul_of(tiled.product), body.equations
    names = part_names(body.inputs, body.outputs)
    weights, tiles = (names[v] for v in with_tiles.inputs)
    names[with_tiles.outputs[0]] = weights  # rows or the epilogue may be the weights, too
    end = epilogue(tiled.product, "After")
    transposed = str(matmul.params["transpose_b"]).lower()
    lines = [
        f"typedef TiledProduct<{inputs}, {columns}, {splits}, {transposed}> Product;",
        f'static_assert(Product::SHARED == {tiled.shared} && Product::THREADS == THREADS, "as planned");',
        "Product product;",
        f"const After after = {{{', '.join(names[v] for v in (*end.inputs, *end.outputs))}}};",
        f"product.run({names[matmul.inputs[0]]}, {{{weights}, (const char *){tiles}}}, after);",
    ]
    headers, blocks = ("common/epilogue.cuh", "gemm/tiled_product.cuh"), rows // ROWS * splits
    part = Part(lines, body.inputs, body.outputs, headers, end.text, blocks, tiled.shared)
    return kernel("tiled_product", [part], THREADS, "float")


define(Form(TILED_PRODUCT, lambda equation, target: [tiled_product(equation, target)]))
