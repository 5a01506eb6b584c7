"""Back-to-back products: two matrix products and the elementwise equation between them, as one kernel.

The result of the first product, after the elementwise equation, is an operand of the second one, as in the two linear
layers of a transformer's block and in their gradients. A thread block holds this result in registers, for its own rows
and for some columns at a time. So the second product does not read it from memory (a back-to-back GEMM in CUTLASS).
"""

from __future__ import annotations

from dataclasses import dataclass

from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel, Part, kernel
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.tile_primitives import CHUNK, TERMS, TILE
from adtrain.backends.cuda.forms.tiled_product import BARRIERS, fills, is_float32_product, matmul_in
from adtrain.codegen.expressions import pointer
from adtrain.core.fused import PRODUCT, body_of
from adtrain.core.program import Equation, Program
from adtrain.core.target import Target
from adtrain.passes.groups import Groups

BACK_TO_BACK = "back_to_back"
"""Two matrix products with elementwise epilogues. The result of the first stays in registers, as an operand of the
second. Each product comes after its `with_tiles` equation."""

WARPGROUPS, ROWS = 2, 64
"""Warpgroups of a block that multiply; rows of a warpgroup."""
CLUSTER = 2
"""Blocks that compute the same rows. They divide the columns between the products."""
STAGES = 5
"""Tiles of weights in the shared memory of a block."""
MAX_LENGTH = 2 * TILE
"""Maximum K of the first product and columns of the second one: accumulators are in registers."""
ITEMSIZE = 4
"""Bytes of float32. A thread passes four neighbours to the epilogue, in vectors of 16 bytes."""


@dataclass(frozen=True)
class BackToBack:
    """The equations in a `back_to_back` equation: two products, whose second operands have tiles."""

    first: Equation
    second: Equation

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """Rows; K of the first product; columns between the products; columns of the second product."""
        a, c = matmul_in(self.first).inputs[0], matmul_in(self.second).outputs[0]
        rows, hidden = matmul_in(self.first).outputs[0].type.shape
        return rows, a.type.shape[1], hidden, c.type.shape[1]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the terms of its rows, tiles of weights, and barriers."""
        _, inputs, _, _ = self.lengths
        return (WARPGROUPS * inputs // TILE + STAGES) * TERMS * TILE * TILE * 2 + BARRIERS

    def fits(self, target: Target) -> bool:
        rows, inputs, hidden, outputs = self.lengths
        whole = not (rows % (WARPGROUPS * ROWS) or inputs % TILE or hidden % (CLUSTER * TILE) or outputs % TILE)
        fits = max(inputs, outputs) <= MAX_LENGTH and self.shared <= target.shared
        return whole and fits and fills(rows // ROWS, target)


def back_to_back_of(equation: Equation) -> BackToBack:
    """The products in a `back_to_back` equation."""
    _, first, _, second = body_of(equation).equations
    return BackToBack(first, second)


def pairs_back_to_back(program: Program, target: Target) -> dict[int, int]:
    """The position of the second product of each suitable pair, by the position of the first."""
    found: dict[int, int] = {}
    groups, readers = Groups(program), program.readers
    for i, e in enumerate(program.equations):
        producer = groups.producer.get(matmul_in(e).inputs[0]) if is_float32_product(e) else None
        if producer is None or len(groups.members[groups.of[producer]]) > 1:
            continue
        first = program.equations[producer]
        if first.form != PRODUCT or not is_float32_product(first) or not BackToBack(first, e).fits(target):
            continue
        hidden = matmul_in(e).inputs[0]
        # The kernel recomputes sums that are not finite from the hidden columns in memory.
        stored = len(readers[hidden]) > 1 or hidden in program.outputs
        fits_vectors = all(x.type.dtype.itemsize <= ITEMSIZE for x in first.inputs)
        float32 = all(x.type.dtype.name == "float32" for x in (*first.outputs, *e.outputs))
        weights = {matmul_in(x).inputs[1] for x in (first, e)}
        epilogue_inputs = {x for inner in body_of(e).equations[1:] for x in inner.inputs}
        from_start = weights.isdisjoint(groups.producer)  # so one launch at the start makes all tiles
        independent = epilogue_inputs.isdisjoint(first.outputs)  # the other block stores half of these columns
        if stored and fits_vectors and float32 and independent and from_start and groups.can_merge(producer, i):
            groups.merge(producer, i)
            found[producer] = i
    return found


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
        headers = ("common/common.cuh", "gemm/tile_products.cuh")
        parts.append(Part(lines, (weights,), (tiles,), headers, blocks=-(-chunks // TILE_THREADS)))
    return kernel("weight_tiles", parts, TILE_THREADS, "float")


define(Form(BACK_TO_BACK, lambda equation, lowering: [back_to_back(equation)]))
define(Form("weight_tiles", lambda equation, lowering: [weight_tiles(equation)]))
