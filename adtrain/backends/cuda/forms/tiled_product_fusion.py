"""Products of many rows with weights in tiles.

A thread block computes 128 rows and some of the columns. Bulk copies fetch tiles of weights that are already split
into bfloat16 terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from adtrain.backends.cuda.forms.horizontal_fusion import is_product
from adtrain.backends.cuda.forms.weight_tiles import TERMS, TILE
from adtrain.core.fused import body_of
from adtrain.core.precision import FULL
from adtrain.core.program import Equation
from adtrain.core.target import Target

ROWS = 128
"""Rows of a block."""
MIN_UTILIZATION = 0.65
"""Minimum share of the multiprocessors that have a block, on average over waves. From there on tiles are estimated to
be faster than `gemm_bf16x3`, which was not measured, and one kernel of two products faster than two. At 0.97 that
kernel was measured to take 0.62 of the time of two."""
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
        matmul = matmul_in(self.product)
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
    matmul = matmul_in(equation)
    supported = not matmul.params["transpose_a"] and matmul.params["precision"] == FULL
    matrices = all(v.type.dtype.name == "float32" and len(v.type.shape) == 2 for v in (*matmul.inputs, *matmul.outputs))
    return supported and matrices


def matmul_in(product: Equation) -> Equation:
    """The matrix product in an equation for which `is_product` is true."""
    return body_of(product).equations[0]
