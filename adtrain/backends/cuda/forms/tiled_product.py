"""Products of many rows with weights in tiles.

A thread block computes 128 rows and some of the columns. Bulk copies fetch tiles of weights that are already split
into bfloat16 terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.horizontal import is_product
from adtrain.backends.cuda.forms.tile_primitives import TERMS, TILE
from adtrain.codegen.expressions import pointer
from adtrain.core.fused import body_of
from adtrain.core.precision import FULL
from adtrain.core.program import Equation
from adtrain.core.target import Target

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


THREADS = 384
"""Threads of a block: two warpgroups multiply, one copies."""


def tiled_product(equation: Equation, target: Target) -> Kernel:
    """The kernel of a `tiled_product` equation."""
    body, tiled = body_of(equation), tiled_product_of(equation)
    (rows, inputs, columns), splits = tiled.lengths, tiled.column_splits(target)
    matmul, (with_tiles, _) = matmul_of(tiled.product), body.equations
    operands = [*body.inputs, *body.outputs]
    pointers = {v: f"p{i}" for i, v in enumerate(operands)}
    parameters = [f"{pointer(v, const=v not in body.outputs)}{pointers[v]}" for v in operands]
    weights, tiles = (pointers[v] for v in with_tiles.inputs)
    pointers[with_tiles.outputs[0]] = weights  # rows or the epilogue may be the weights, too
    end = epilogue(tiled.product, "After")
    transposed = str(matmul.params["transpose_b"]).lower()
    text = [
        "#define T float",
        '#include "common/epilogue.cuh"',
        '#include "gemm/tiled_product.cuh"',
        end.text,
        f"typedef TiledProduct<{inputs}, {columns}, {splits}, {transposed}> Product;",
        f'static_assert(Product::SHARED == {tiled.shared} && Product::THREADS == {THREADS}, "as planned");',
        "",
        f"KERNEL __launch_bounds__({THREADS}, 1) tiled_product({', '.join(parameters)})",
        "{",
        f"    {FIRST_STATEMENT}",
        "    Product product;",
        f"    const After after = {{{', '.join(pointers[v] for v in (*end.inputs, *end.outputs))}}};",
        f"    product.run({pointers[matmul.inputs[0]]}, {{{weights}, (const char *){tiles}}}, after);",
        "}",
        "",
    ]
    source = Source("tiled_product.cu", "\n".join(text), OPTIONS)
    blocks = rows // ROWS * splits
    return Kernel(source, "tiled_product", operands, blocks, THREADS, tiled.shared, 0, checked=False)


define(Form(TILED_PRODUCT, lambda equation, lowering: [tiled_product(equation, lowering.target)]))
