"""The kernels of `back_to_back` and `weight_tiles` equations."""

from __future__ import annotations

from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel, Part, kernel
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.back_to_back_fusion import CLUSTER, ROWS, WARPGROUPS, back_to_back_of
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.weight_tiles import CHUNK
from adtrain.codegen.expressions import pointer
from adtrain.core.fused import BACK_TO_BACK, body_of
from adtrain.core.program import Equation

THREADS = (WARPGROUPS + 1) * 128
"""Threads of a block: two warpgroups multiply, one copies."""
TILE_THREADS = 128
"""Threads of a block that divides weights into tiles."""


def back_to_back(equation: Equation) -> Kernel:
    """The kernel of a `back_to_back` equation."""
    body, pair = body_of(equation), back_to_back_of(equation)
    rows, inputs, hidden, outputs = pair.lengths
    first, second = matmul_of(pair.first), matmul_of(pair.second)
    operands = [*body.inputs, *body.outputs]
    pointers = {v: f"p{i}" for i, v in enumerate(operands)}
    parameters = [f"{pointer(v, const=v not in body.outputs)}{pointers[v]}" for v in operands]
    with_tiles = body.equations[::2]
    weights = ["{" + f"{pointers[e.inputs[0]]}, (const char *){pointers[e.inputs[1]]}" + "}" for e in with_tiles]
    pointers |= {e.outputs[0]: pointers[e.inputs[0]] for e in with_tiles}  # rows or an epilogue may be the weights, too
    multiplied = second.inputs[0]
    inner, outer = epilogue(pair.first, "Inner", multiplied), epilogue(pair.second, "Outer")
    fields = [", ".join(pointers[v] for v in (*end.inputs, *end.outputs)) for end in (inner, outer)]
    transposed = [str(e.params["transpose_b"]).lower() for e in (first, second)]
    text = [
        "#define T float",
        '#include "common/epilogue.cuh"',
        '#include "gemm/back_to_back.cuh"',
        inner.text,
        outer.text,
        f"typedef BackToBack<{inputs}, {hidden}, {outputs}, {', '.join(transposed)}> Products;",
        f'static_assert(Products::SHARED == {pair.shared} && Products::THREADS == {THREADS}, "as planned");',
        "",
        f"KERNEL CLUSTER_DIMS __launch_bounds__({THREADS}, 1) back_to_back({', '.join(parameters)})",
        "{",
        f"    {FIRST_STATEMENT}",
        "    Products products;",
        f"    const Inner inner = {{{fields[0]}}};",
        f"    const Outer outer = {{{fields[1]}}};",
        f"    const TiledWeights first = {weights[0]}, second = {weights[1]};",
        f"    products.run({pointers[first.inputs[0]]}, first, second, {pointers[multiplied]}, inner, outer);",
        "}",
        "",
    ]
    source = Source("back_to_back.cu", "\n".join(text), (*OPTIONS, f"-DCLUSTER={CLUSTER}"))
    blocks = rows // (WARPGROUPS * ROWS) * CLUSTER
    return Kernel(source, "back_to_back", operands, blocks, THREADS, pair.shared, 0, checked=False)


def weight_tiles(equation: Equation) -> Kernel:
    """The kernel of a `weight_tiles` equation: a thread splits a chunk of neighbours."""
    parts = []
    for weights, tiles, permuted in zip(equation.inputs, equation.outputs, equation.params["permuted"], strict=True):
        chunks = weights.size // CHUNK
        lines = [
            "const int chunk = block * THREADS + threadIdx.x;",
            f"if (chunk < {chunks}) store_tile_chunk<{permuted}>(x0, (char *)y0, {weights.type.shape[1]}, chunk);",
        ]
        headers = ("common/common.cuh", "gemm/tiled_weights.cuh")
        parts.append(Part(lines, (weights,), (tiles,), headers, blocks=-(-chunks // TILE_THREADS)))
    return kernel("weight_tiles", parts, TILE_THREADS, "float")


define(Form(BACK_TO_BACK, lambda equation, lowering: [back_to_back(equation)]))
define(Form("weight_tiles", lambda equation, lowering: [weight_tiles(equation)]))
