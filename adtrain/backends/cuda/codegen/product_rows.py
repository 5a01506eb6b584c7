"""The epilogue of a product whose thread blocks have whole rows: row-wise equations, with the rows in registers."""

from __future__ import annotations

from adtrain.backends.cuda.codegen.part import indented
from adtrain.backends.cuda.codegen.product import Epilogue, matmul_of
from adtrain.backends.cuda.codegen.register_rows import RowWriter
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.program import Equation
from adtrain.core.target import Target
from adtrain.lowering.cuda.gemm.bf16x3 import THREADS, Bf16x3Gemm, Bf16x3Tile
from adtrain.lowering.cuda.gemm.cost_model import BF16X3_WIDTHS
from adtrain.lowering.shapes import product_lengths
from adtrain.passes.fuse_product_rows import ROWS, rows_after

VECTOR = 4
"""Neighbouring elements of a row that a thread loads at once."""
TEAM = THREADS // ROWS
"""Threads that share a row."""


def product_rows_gemm(equation: Equation, target: Target) -> Bf16x3Gemm:
    """The product of a `product_rows` equation."""
    matmul = matmul_of(equation)
    a, b = matmul.inputs
    transposed = matmul.params["transpose_a"], matmul.params["transpose_b"]
    lengths = product_lengths(a.type, b.type, *transposed)
    width = next(n for n in BF16X3_WIDTHS if n >= lengths[2])
    return Bf16x3Gemm(target, lengths, Bf16x3Tile(width, ROWS), 1, transposed, whole_rows=True)


def row_epilogue(equation: Equation) -> Epilogue:
    """The epilogue of a `product_rows` equation, for WHOLE_ROWS of `gemm/gemm_bf16x3.cu`."""
    rows = rows_after(equation)
    c, *inputs = rows.inputs
    count, length = c.type.shape
    writer = RowWriter(rows, count, length)
    assert writer.write({c: "c"}), "has_rows() was true"
    items = -(-length // (TEAM * VECTOR))
    element = c_type(c.type.dtype)
    text = [
        '#include "reduce/register_rows.cuh"',
        "struct Epilogue {",
        *(f"    {pointer(v, const=True)}x{i};" for i, v in enumerate(rows.inputs) if i > 0),
        *(f"    {pointer(v)}y{i};" for i, v in enumerate(rows.outputs)),
        "    // By all threads of the block: the rows of a staged tile, which is tile `block`.",
        "    template <class Tile> __device__ __forceinline__ void finish(const Tile &tile, int block) const {",
        f"        using Row = RegisterRow<{length}, {TEAM}, {items}, {VECTOR}>;",
        f"        const int own = threadIdx.x / {TEAM};",
        f"        const bool live = block * {ROWS} + own < {count};",
        f"        const int64_t row = live ? block * {ROWS} + own : {count - 1};",
        *indented(indented(writer.loads)),
        "        __syncthreads();",
        f"        {element} c[Row::COUNT];",
        f"        Row::load_vectors([&](int column) {{ return tile.template load<{VECTOR}>(own, column); }}, c);",
        *indented(indented(writer.lines)),
        *indented(indented(writer.stores)),
        "    }",
        "};",
    ]
    return Epilogue("\n".join(text), inputs, rows.outputs)
