"""Back-to-back products, and the pass that gives products of many rows tiles of their weights.

The result of the first of two products, after the elementwise equation between them, is an operand of the second one,
as in the two linear layers of a transformer's block and in their gradients. A thread block holds this result in
registers, for its own rows and for some columns at a time. So the second product does not read it from memory (a
back-to-back GEMM in CUTLASS).

Many thread blocks read the same weights. So one equation at the start of the step splits these into tiles of bfloat16
terms. The products read the tiles by bulk copies. Products that need the same tiles share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel, part_names
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.horizontal import MAX_POINTERS
from adtrain.backends.cuda.forms.tiled_product import (
    BARRIERS,
    CHUNK,
    TERMS,
    TILE,
    TILED_PRODUCT,
    TiledProduct,
    fills,
    is_float32_product,
    weight_tiles_p,
    with_tiles_p,
)
from adtrain.core.kernel import HOPPER, Target
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of, fuse, renamed
from adtrain.core.staging import Results, keeps
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
        a, c = matmul_of(self.first).inputs[0], matmul_of(self.second).outputs[0]
        rows, hidden = matmul_of(self.first).outputs[0].type.shape
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
        producer = groups.producer.get(matmul_of(e).inputs[0]) if is_float32_product(e) else None
        if producer is None or len(groups.members[groups.of[producer]]) > 1:
            continue
        first = program.equations[producer]
        if first.form != PRODUCT or not is_float32_product(first) or not BackToBack(first, e).fits(target):
            continue
        hidden = matmul_of(e).inputs[0]
        # The kernel recomputes sums that are not finite from the hidden columns in memory.
        stored = len(readers[hidden]) > 1 or hidden in program.outputs
        fits_vectors = all(x.type.dtype.itemsize <= ITEMSIZE for x in first.inputs)
        float32 = all(x.type.dtype.name == "float32" for x in (*first.outputs, *e.outputs))
        weights = {matmul_of(x).inputs[1] for x in (first, e)}
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
    names = part_names(body.inputs, body.outputs)
    with_tiles = body.equations[::2]
    weights = ["{" + f"{names[e.inputs[0]]}, (const char *){names[e.inputs[1]]}" + "}" for e in with_tiles]
    names |= {e.outputs[0]: names[e.inputs[0]] for e in with_tiles}  # rows or an epilogue may be the weights, too
    multiplied = second.inputs[0]
    inner, outer = epilogue(pair.first, "Inner", multiplied), epilogue(pair.second, "Outer")
    fields = [", ".join(names[v] for v in (*end.inputs, *end.outputs)) for end in (inner, outer)]
    transposed = [str(e.params["transpose_b"]).lower() for e in (first, second)]
    lines = [
        f"typedef BackToBack<{inputs}, {hidden}, {outputs}, {', '.join(transposed)}> Products;",
        f'static_assert(Products::SHARED == {pair.shared} && Products::THREADS == THREADS, "as planned");',
        "Products products;",
        f"const Inner inner = {{{fields[0]}}};",
        f"const Outer outer = {{{fields[1]}}};",
        f"const TiledWeights first = {weights[0]}, second = {weights[1]};",
        f"products.run({names[first.inputs[0]]}, first, second, {names[multiplied]}, inner, outer);",
    ]
    headers, definitions = ("common/epilogue.cuh", "gemm/back_to_back.cuh"), f"{inner.text}\n{outer.text}"
    blocks = rows // (WARPGROUPS * ROWS) * CLUSTER
    part = Part(lines, body.inputs, body.outputs, headers, definitions, blocks, pair.shared)
    return kernel("back_to_back", [part], THREADS, "float", cluster=CLUSTER)


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


define(Form(BACK_TO_BACK, lambda equation, target: [back_to_back(equation)]))
define(Form("weight_tiles", lambda equation, target: [weight_tiles(equation)]))


MAX_WEIGHTS = MAX_POINTERS // 2
"""Maximum matrices of weights of an equation: they and their tiles are arguments of a kernel."""


@keeps(Results.EXACT)
def tile_weights(program: Program, target: Target) -> Program:
    """The Program with a `back_to_back` equation for each suitable pair of products, and a `tiled_product` equation for
    each other suitable product."""
    if target.capability != HOPPER or target.by_member:
        return program
    pairs = pairs_back_to_back(program, target)
    in_pairs = {i for pair in pairs.items() for i in pair}
    computed = {v for e in program.equations for v in e.outputs}
    single = [
        i
        for i, e in enumerate(program.equations)
        if i not in in_pairs
        and is_float32_product(e)
        and matmul_of(e).inputs[1] not in computed  # so that one launch at the start makes all tiles
        and TiledProduct(e).fits(target)
    ]
    keys = {i: _tiling(program.equations[i], i in pairs) for i in (*in_pairs, *single)}
    if not keys:
        return program
    program, position = _with_tiles(program, {i: keys[i] for i in sorted(keys)})
    groups = Groups(program)
    for products in (*pairs.items(), *((i,) for i in single)):
        # The `with_tiles` equation of a product is right before it.
        first, *others = (at for i in products for at in (position[i] - 1, position[i]))
        for at in others:
            groups.merge(groups.of[first], at)
    return groups.rewritten(_fused)


def _with_tiles(program: Program, keys: Mapping[int, tuple[Variable, int]]) -> tuple[Program, Mapping[int, int]]:
    """Add `weight_tiles` equations at the start, and a `with_tiles` equation before each of some products.

    Args:
        keys: the weights and the permuted axis of each of these products, by its position.

    Returns:
        The Program, and the new position of each equation.
    """
    distinct, like = list(dict.fromkeys(keys.values())), program.equations[next(iter(keys))]
    divided = [_weight_tiles(distinct[i : i + MAX_WEIGHTS], like) for i in range(0, len(distinct), MAX_WEIGHTS)]
    tiles = dict(zip(distinct, (v for e in divided for v in e.outputs), strict=True))
    equations, position = list(divided), {}
    for i, e in enumerate(program.equations):
        if i in keys:
            weights, _ = keys[i]
            tiled = weights.like()
            equations.append(Equation(with_tiles_p, (weights, tiles[keys[i]]), {}, (tiled,), e.scope, e.phase))
            e = renamed(e, {weights: tiled})
        position[i] = len(equations)
        equations.append(e)
    return replace(program, equations=tuple(equations)), position


def _fused(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    return fuse(BACK_TO_BACK if len(equations) > 2 else TILED_PRODUCT, equations, needed)


def _tiling(product: Equation, is_first: bool) -> tuple[Variable, int]:
    """The weights of a product, and the axis along which tiles are permuted.

    This axis is K. In the first product of a pair it is the columns, which are K of the second one.
    """
    matmul = matmul_of(product)
    return matmul.inputs[1], int(matmul.params["transpose_b"] != is_first)


def _weight_tiles(keys: Sequence[tuple[Variable, int]], like: Equation) -> Equation:
    """The `weight_tiles` equation of several weights, each with its permuted axis. It has the scope and phase of
    ``like``."""
    weights, axes = zip(*keys, strict=True)
    params = {"permuted": axes}
    types = weight_tiles_p.output_types([v.type for v in weights], params)
    outputs = tuple(Variable(kind, v.device) for kind, v in zip(types, weights, strict=True))
    return Equation(weight_tiles_p, weights, params, outputs, like.scope, like.phase)
