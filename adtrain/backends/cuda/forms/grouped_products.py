"""Grouped products: a launch that computes partial sums of all products; one that adds them and runs the epilogues.

Sums of columns share the first launch. If a product loads the same matrix, its blocks add the columns. Other sums have
their own blocks, which wait for memory while the others multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.forms.column_sum import TOTAL, after_total, column_sum, summed_matrix
from adtrain.backends.cuda.forms.column_sum_fusion import column_blocks
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.horizontal_fusion import product_lengths
from adtrain.core.fused import COLUMN_SUM, GROUPED_PRODUCTS, body_of
from adtrain.core.program import Equation
from adtrain.core.target import Target
from adtrain.lowering.cuda.gemm.bf16x3 import (
    BUFFERS,
    CHUNK_BYTES,
    CHUNK_ELEMENTS,
    PRODUCER_THREADS,
    STAGES,
    TERMS,
    TILE_K,
    Bf16x3Tile,
)
from adtrain.lowering.cuda.gemm.bf16x3 import THREADS as GEMM_THREADS
from adtrain.lowering.cuda.gemm.cost_model import BF16X3_EVEN_WIDTHS, bf16x3_stage_cycles
from adtrain.lowering.cuda.gemm.tiles import WARP

THREADS, VECTOR = 256, 4
"""Threads of a block of the second launch; maximum of neighbouring elements that a thread computes."""
BYTES_PER_CYCLE = 30
"""Bytes that a multiprocessor reads in a cycle for sums of columns."""
ITEMSIZE = np.dtype(np.float32).itemsize


def grouped_products(equation: Equation, target: Target) -> list[Kernel]:
    """The two launches of a `grouped_products` equation."""
    members = equation.params["body"].equations
    sums = sorted((e for e in members if e.form == COLUMN_SUM), key=_elements_per_block, reverse=True)
    products = [e for e in members if e.form != COLUMN_SUM]
    # The first product that loads each matrix as its first factor; the product whose blocks add each sum.
    loaded = {matmul_of(e).inputs[0]: i for i, e in reversed([*enumerate(products)])}
    in_products = {e: loaded[x] for e in sums if (x := summed_matrix(e)) in loaded}
    sums = [e for e in sums if e not in in_products]
    lengths = [product_lengths(e)[1:] for e in products]
    tile = min(map(Bf16x3Tile, BF16X3_EVEN_WIDTHS), key=lambda t: sum(_stages(t, lengths)) * bf16x3_stage_cycles(t))
    stages, tiles = sum(_stages(tile, lengths)), [tile.tiles(1, m, n) for m, n, _ in lengths]
    multiply = stages * bf16x3_stage_cycles(tile)
    read = sum(ITEMSIZE * v.size for e in sums for v in e.inputs) / BYTES_PER_CYCLE
    blocks = min(max(1, round(target.multiprocessors * multiply / (multiply + read))), stages)
    shared = _shared(tile) + (PRODUCER_THREADS * CHUNK_ELEMENTS * ITEMSIZE if in_products else 0)
    macros = {
        "TILE_N": tile.n,
        **{"TRANSPOSE_A": 1, "TRANSPOSE_B": 0, "WIDE_A": 4, "WIDE_B": 4, "WIDE_C": 2, "SHARED_BYTES": shared},
        "GROUPED_ROW_SUMS": int(bool(in_products)),
        "GROUPED_BLOCKS": blocks,
        "GROUPED_COUNT": len(products),
        "GROUPED_LENGTHS": ",".join(f"{{{m},{n},{k}}}" for m, n, k in lengths),
    }
    factors = ", ".join(f"{{x{2 * i}, x{2 * i + 1}}}" for i in range(len(products)))
    row_sums = PRODUCER_THREADS // WARP if in_products else 0
    scratch = (sum(tiles) + blocks) * tile.m * (tile.n + row_sums) * ITEMSIZE
    first = Part(
        [f"const T *const factors[][2] = {{{factors}}};", "multiply_group(factors, own, block);"],
        [v for e in products for v in matmul_of(e).inputs],
        (),
        ("common/common.cuh", "gemm/grouped_bf16x3.cuh"),
        blocks=blocks,
        shared=shared,
        scratch=scratch,
        fills_registers=True,
    )
    names: dict[str, str] = {}
    parts = []
    for i, e in enumerate(products):
        name = names.setdefault(epilogue(e, "").text, f"Epilogue{len(names)}")
        parts.append(_sum(e, i, sum(tiles[:i]), name, scratch if i == 0 else 0))  # one scratch memory for all parts
    parts += [_row_sum(e, i, sum(tiles[:i])) for e, i in in_products.items()]
    launches = [
        kernel("grouped_products", [first, *(column_sum(e, GEMM_THREADS) for e in sums)], GEMM_THREADS, "float"),
        kernel("grouped_sum", parts, THREADS, "float"),
    ]
    options = tuple(f"-D{name}={value}" for name, value in macros.items())
    return [replace(k, source=k.source._replace(options=(*k.source.options, *options))) for k in launches]


def _sum(equation: Equation, number: int, first_tile: int, name: str, scratch: int) -> Part:
    """The part that adds the partial sums of a product and passes them to its epilogue."""
    after = epilogue(equation, name)
    pointers = [f"x{i}" for i in range(len(after.inputs))] + [f"y{i}" for i in range(len(after.outputs))]
    _, m, n, _ = product_lengths(equation)
    wide = gcd(n, VECTOR)
    lines = [
        f"const {name} out = {{{', '.join(pointers)}}};",
        f"add_parts<{number}, {first_tile}, THREADS, {wide}>(scratch, out, block);",
    ]
    headers = ("common/common.cuh", "gemm/grouped_sum.cuh")
    blocks = -(-m * n // (THREADS * wide))
    return Part(lines, after.inputs, after.outputs, headers, after.text, blocks, scratch=scratch)


def _row_sum(equation: Equation, number: int, first_tile: int) -> Part:
    """The part that adds the partial sums of columns of a product's first factor, and computes outputs from them."""
    body = body_of(equation)
    columns = body.equations[0].outputs[0].size
    lines = [
        "const int column = block * THREADS + threadIdx.x;",
        f"if (column >= {columns}) return;",
        f"const {TOTAL} total = row_sum<{number}, {first_tile}>(scratch, column);",
        *after_total(equation),
    ]
    headers = ("common/common.cuh", "gemm/grouped_sum.cuh")
    return Part(lines, body.inputs, body.outputs, headers, blocks=-(-columns // THREADS))


def _elements_per_block(equation: Equation) -> float:
    """The elements that a block of a sum of columns reads. Blocks with the most start first: all end together."""
    return sum(v.size for v in equation.inputs) / column_blocks(equation)


def _stages(tile: Bf16x3Tile, lengths: Sequence[tuple[int, int, int]]) -> list[int]:
    """The stages of all tiles of each product, whose M, N and K are given."""
    return [tile.tiles(1, m, n) * -(-k // TILE_K) for m, n, k in lengths]


def _shared(tile: Bf16x3Tile) -> int:
    """Bytes of shared memory of the products: the pipeline, and buffers of float32."""
    copied = TILE_K * CHUNK_ELEMENTS * ITEMSIZE
    chunks = (tile.m + tile.n) // CHUNK_ELEMENTS
    return chunks * (STAGES * TERMS * (TILE_K + 1) * CHUNK_BYTES + BUFFERS * copied)


define(Form(GROUPED_PRODUCTS, lambda equation, lowering: grouped_products(equation, lowering.target)))
