"""Back-to-back fusion: two matrix products and the elementwise equation between them, as one kernel.

The result of the first product, after the elementwise equation, is an operand of the second one, as in the two linear
layers of a transformer's block and in their gradients. Thread blocks hold some rows of it in registers, some columns at
a time, so it is not read from memory again (a back-to-back GEMM in CUTLASS). All blocks need all weights. So an
equation at the start of the step divides these into tiles of bfloat16 terms. Layer and gradient share the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from adtrain.core.fused import back_to_back_p, body_of, fuse, product_p, renamed
from adtrain.core.precision import FULL
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.core.weight_tiles import TERMS, TILE, weight_tiles_p, with_tiles_p
from adtrain.passes.fuse_horizontally import MAX_POINTERS, is_product
from adtrain.passes.groups import Groups

CAPABILITY = (9, 0)
"""The compute capability that has WGMMA."""
WARPGROUPS, ROWS = 2, 64
"""Warpgroups of a block that multiply; rows of a warpgroup."""
CLUSTER = 2
"""Blocks that compute the same rows: each takes its part of the columns between the products."""
MIN_USE = 0.65
"""The part of the multiprocessors that the blocks use, on average over waves, from which one kernel is estimated to be
faster. At 0.97 it was measured to take 0.62 of the time of two."""
STAGES = 5
"""Tiles of weights in the shared memory of a block."""
BARRIERS = 256
"""Bytes for the barriers in shared memory."""
MAX_LENGTH = 2 * TILE
"""Maximum K of the first product and columns of the second one: accumulators are in registers."""
MAX_WEIGHTS = MAX_POINTERS // 2
"""Maximum matrices of weights of an equation: they and their tiles are arguments of a kernel."""
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
        a, c = _matmul(self.first).inputs[0], _matmul(self.second).outputs[0]
        rows, hidden = _matmul(self.first).outputs[0].type.shape
        return rows, a.type.shape[1], hidden, c.type.shape[1]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the terms of its rows, tiles of weights, and barriers."""
        _, inputs, _, _ = self.lengths
        return (WARPGROUPS * inputs // TILE + STAGES) * TERMS * TILE * TILE * 2 + BARRIERS

    def fits(self, target: Target) -> bool:
        rows, inputs, hidden, outputs = self.lengths
        whole = not (rows % (WARPGROUPS * ROWS) or inputs % TILE or hidden % (CLUSTER * TILE) or outputs % TILE)
        blocks = rows // ROWS
        waves = -(-blocks // target.multiprocessors)
        fills = blocks >= MIN_USE * waves * target.multiprocessors
        return whole and fills and max(inputs, outputs) <= MAX_LENGTH and self.shared <= target.shared


def fuse_back_to_back(program: Program, target: Target) -> Program:
    """The Program with a `back_to_back` equation for each suitable pair of products."""
    if target.capability != CAPABILITY:
        return program
    pairs = _pairs(program, target)
    if not pairs:
        return program
    keys = {i: _weights(program.equations[i], i in pairs) for pair in pairs.items() for i in pair}
    distinct, beside = list(dict.fromkeys(keys.values())), program.equations[next(iter(pairs))]
    divided = [_weight_tiles(distinct[i : i + MAX_WEIGHTS], beside) for i in range(0, len(distinct), MAX_WEIGHTS)]
    tiles = dict(zip(distinct, (v for e in divided for v in e.outputs), strict=True))
    equations, position = list(divided), {}
    for i, e in enumerate(program.equations):
        if i in keys:
            weights, _ = keys[i]
            tiled = Variable(weights.type, weights.device)
            equations.append(Equation(with_tiles_p, (weights, tiles[keys[i]]), {}, (tiled,), e.scope, e.phase))
            e = renamed(e, {weights: tiled})
        position[i] = len(equations)
        equations.append(e)
    groups = Groups(replace(program, equations=tuple(equations)))
    for pair in pairs.items():
        first, second = (position[i] for i in pair)
        for i in (first, second - 1, second):  # each product comes after its `with_tiles` equation
            groups.merge(groups.of[first - 1], i)
    return groups.rewritten(partial(fuse, back_to_back_p))


def back_to_back_of(equation: Equation) -> BackToBack:
    """The products in a `back_to_back` equation."""
    _, first, _, second = body_of(equation).equations
    return BackToBack(first, second)


def _pairs(program: Program, target: Target) -> dict[int, int]:
    """Suitable pairs: from the position of the first product to that of the second."""
    found: dict[int, int] = {}
    groups, readers = Groups(program), program.readers
    for i, e in enumerate(program.equations):
        p = groups.producer.get(_matmul(e).inputs[0]) if _is_float32(e) else None
        if p is None or len(groups.members[groups.of[p]]) > 1:
            continue
        first = program.equations[p]
        if first.primitive is not product_p or not _is_float32(first) or not BackToBack(first, e).fits(target):
            continue
        v = _matmul(e).inputs[0]
        stored = len(readers[v]) > 1 or v in program.outputs  # from it the kernel recomputes sums that are not finite
        single = all(x.type.dtype.itemsize <= ITEMSIZE for x in (*first.inputs, *first.outputs))
        weights = {_matmul(x).inputs[1] for x in (first, e)}
        after = {x for inner in body_of(e).equations[1:] for x in inner.inputs}
        at_start = weights.isdisjoint(groups.producer)  # so one launch at the start makes all tiles
        independent = after.isdisjoint(first.outputs)  # the other block stores half of these columns
        if stored and single and independent and at_start and groups.can_merge(p, i):
            groups.merge(p, i)
            found[p] = i
    return found


def _is_float32(equation: Equation) -> bool:
    """Whether it is a product of float32 matrices in full precision. The first matrix is not transposed."""
    if not is_product(equation):
        return False
    matmul = _matmul(equation)
    known = matmul.params["transpose_a"], matmul.params["precision"]
    variables = (*matmul.inputs, *matmul.outputs, *equation.outputs)
    matrices = all(v.type.dtype.name == "float32" and len(v.type.shape) == 2 for v in variables)
    return known == (False, FULL) and matrices


def _weights(product: Equation, is_first: bool) -> tuple[Variable, int]:
    """The weights of a product, and their axis of columns between the products, which is permuted."""
    matmul = _matmul(product)
    return matmul.inputs[1], int(matmul.params["transpose_b"] != is_first)


def _weight_tiles(keys: Sequence[tuple[Variable, int]], beside: Equation) -> Equation:
    """The `weight_tiles` equation of several weights, each with its permuted axis. It has the scope and phase of
    ``beside``."""
    weights, axes = zip(*keys, strict=True)
    params = {"permuted": axes}
    types = weight_tiles_p.output_types([v.type for v in weights], params)
    outputs = tuple(Variable(kind, v.device) for kind, v in zip(types, weights, strict=True))
    return Equation(weight_tiles_p, weights, params, outputs, beside.scope, beside.phase)


def _matmul(equation: Equation) -> Equation:
    """The matrix product in an equation for which `is_product` is true."""
    return body_of(equation).equations[0]
