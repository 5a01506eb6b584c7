"""The epilogue of a product whose thread blocks have whole rows: row-wise equations, with the rows in registers."""

from __future__ import annotations

from adtrain.backends.cuda.codegen.part import indented
from adtrain.backends.cuda.codegen.product import Epilogue, matmul_of
from adtrain.backends.cuda.codegen.register_rows import RowWriter
from adtrain.codegen.expressions import pointer
from adtrain.core.program import Equation
from adtrain.core.target import Target
from adtrain.lowering.cuda.gemm.bf16x3 import THREADS, Bf16x3Gemm, Bf16x3Tile
from adtrain.lowering.shapes import product_lengths
from adtrain.passes.fuse_product_rows import MAX_COLUMNS, ROWS, VECTOR, rows_after

TEAM = THREADS // ROWS
"""Threads that share a row."""


def product_rows_gemm(equation: Equation, target: Target) -> Bf16x3Gemm:
    """The product of a `product_rows` equation."""
    matmul = matmul_of(equation)
    a, b = matmul.inputs
    transposed = matmul.params["transpose_a"], matmul.params["transpose_b"]
    lengths = product_lengths(a.type, b.type, *transposed)
    return Bf16x3Gemm(target, lengths, Bf16x3Tile(MAX_COLUMNS, whole_rows=True), 1, transposed)


def row_epilogue(equation: Equation) -> Epilogue:
    """The epilogue of a `product_rows` equation, for WHOLE_ROWS of `gemm/gemm_bf16x3.cu`."""
    rows = rows_after(equation)
    c, *inputs = rows.inputs
    count, length = c.type.shape
    writer = RowWriter(rows, count, length)
    written = writer.write({c: "c"})
    assert written, "fuse_product_rows() chooses equations that have a form"
    text = [
        '#include "reduce/register_rows.cuh"',
        "struct Epilogue {",
        *(f"    {pointer(v, const=True)}x{i};" for i, v in enumerate(rows.inputs) if i > 0),
        *(f"    {pointer(v)}y{i};" for i, v in enumerate(rows.outputs)),
        "    // By all threads of the block: the rows of a staged tile, which is tile `block`.",
        "    template <class Tile> __device__ __forceinline__ void finish_rows(const Tile &staged, int block) const {",
        f"        using Row = RegisterRow<{length}, {TEAM}, {-(-length // (TEAM * VECTOR))}, {VECTOR}>;",
        f"        const int own = threadIdx.x / {TEAM};",
        f"        const bool live = block * {ROWS} + own < {count};",
        f"        const int64_t row = live ? block * {ROWS} + own : {count - 1};",
        *indented(indented(writer.loads)),
        "        __syncthreads();",
        "        T c[Row::COUNT];",
        "        Row::load(staged.tile + own * staged.ROW, c);",
        *indented(indented([*writer.lines, *writer.stores])),
        "    }",
        "};",
    ]
    return Epilogue("\n".join(text), inputs, rows.outputs)
