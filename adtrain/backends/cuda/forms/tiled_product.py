"""Products of many rows with weights in tiles; the primitives `weight_tiles` and `with_tiles`.

A thread block computes 128 rows and some of the columns. Bulk copies fetch tiles of weights that are already split
into bfloat16 terms, in the layout that WGMMA reads. The pass `tile_weights` makes the equations of the primitives. It
runs after differentiation, so they have no derivatives.

Two products are back to back if the result of the first one, after an elementwise equation, is an operand of the second
one, as in the two linear layers of a transformer's block and in their gradients. A thread block holds this result in
registers, for its own rows and for some columns at a time. So the second product does not read it from memory (a
back-to-back GEMM in CUTLASS).

Many thread blocks read the same weights. So one equation at the start of the step splits these into tiles of bfloat16
terms. Products that need the same tiles share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adtrain.backends.cuda.codegen.loops import epilogue, matmul_of
from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel, part_names
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.horizontal import MAX_POINTERS, is_product
from adtrain.core.axes import whole
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.kernel import HOPPER, Target
from adtrain.core.precision import FULL
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of, fuse, renamed
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType
from adtrain.passes.groups import Groups

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
    """Whether these blocks, at most one on a multiprocessor at a time, use enough of the device."""
    return blocks >= MIN_UTILIZATION * _waves(blocks, target) * target.multiprocessors


def _waves(blocks: int, target: Target) -> int:
    return -(-blocks // target.multiprocessors)


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
    body = body_of(equation)
    tiled = TiledProduct(body.equations[1])
    (rows, inputs, columns), splits = tiled.lengths, tiled.column_splits(target)
    matmul, with_tiles = matmul_of(tiled.product), body.equations[0]
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
    headers, blocks = ("common/epilogue.cuh", "gemm/tile_products.cuh"), rows // ROWS * splits
    part = Part(lines, body.inputs, body.outputs, headers, end.text, blocks, tiled.shared)
    return kernel("tiled_product", [part], THREADS, "float")


define(Form(TILED_PRODUCT, lambda equation, target: [tiled_product(equation, target)]))


BACK_TO_BACK = "back_to_back"
"""Two matrix products with elementwise epilogues. The result of the first stays in registers, as an operand of the
second. Each product comes after its `with_tiles` equation."""

WARPGROUPS, WARPGROUP_ROWS = 2, 64
"""Warpgroups of a block that multiply; rows of a warpgroup."""
CLUSTER = 2
"""Blocks that compute the same rows. They divide the columns between the products."""
PAIR_STAGES = 5
"""Tiles of weights in the shared memory of a block that computes two products."""
MAX_PAIR_LENGTH = 2 * TILE
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
        return (WARPGROUPS * inputs // TILE + PAIR_STAGES) * TERMS * TILE * TILE * 2 + BARRIERS

    def fits(self, target: Target) -> bool:
        rows, inputs, hidden, outputs = self.lengths
        whole = not (rows % ROWS or inputs % TILE or hidden % (CLUSTER * TILE) or outputs % TILE)
        fits = max(inputs, outputs) <= MAX_PAIR_LENGTH and self.shared <= target.shared
        return whole and fits and fills(rows // WARPGROUP_ROWS, target)


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


TILE_THREADS = 128
"""Threads of a block that divides weights into tiles."""


def back_to_back(equation: Equation) -> Kernel:
    """The kernel of a `back_to_back` equation."""
    body = body_of(equation)
    pair = BackToBack(*body.equations[1::2])
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
    blocks = rows // ROWS * CLUSTER
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
