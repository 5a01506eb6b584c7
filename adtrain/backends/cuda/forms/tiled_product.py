"""The kernel of a `tiled_product` equation."""

from __future__ import annotations

from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.tiled_product_fusion import ROWS, tiled_product_of
from adtrain.codegen.expressions import pointer
from adtrain.core.fused import TILED_PRODUCT, body_of
from adtrain.core.program import Equation
from adtrain.core.target import Target

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
