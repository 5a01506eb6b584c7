"""The pass that gives products of many rows tiles of their weights.

Many thread blocks read the same weights. So one equation at the start of the step splits these into tiles of bfloat16
terms. The products read the tiles by bulk copies. Products that need the same tiles share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adtrain.backends.cuda.forms.back_to_back import BACK_TO_BACK, pairs_back_to_back
from adtrain.backends.cuda.forms.horizontal import MAX_POINTERS
from adtrain.backends.cuda.forms.tile_primitives import weight_tiles_p, with_tiles_p
from adtrain.backends.cuda.forms.tiled_product import TILED_PRODUCT, TiledProduct, is_float32_product, matmul_in
from adtrain.core.fused import fuse, renamed
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.target import Target
from adtrain.passes.groups import Groups

CAPABILITY = (9, 0)
"""The compute capability that has WGMMA."""
MAX_WEIGHTS = MAX_POINTERS // 2
"""Maximum matrices of weights of an equation: they and their tiles are arguments of a kernel."""


@keeps(Results.EXACT)
def tile_weights(program: Program, target: Target) -> Program:
    """The Program with a `back_to_back` equation for each suitable pair of products, and a `tiled_product` equation for
    each other suitable product."""
    if target.capability != CAPABILITY or target.by_member:
        return program
    pairs = pairs_back_to_back(program, target)
    in_pairs = {i for pair in pairs.items() for i in pair}
    computed = {v for e in program.equations for v in e.outputs}
    single = [
        i
        for i, e in enumerate(program.equations)
        if i not in in_pairs
        and is_float32_product(e)
        and matmul_in(e).inputs[1] not in computed  # so that one launch at the start makes all tiles
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
    matmul = matmul_in(product)
    return matmul.inputs[1], int(matmul.params["transpose_b"] != is_first)


def _weight_tiles(keys: Sequence[tuple[Variable, int]], like: Equation) -> Equation:
    """The `weight_tiles` equation of several weights, each with its permuted axis. It has the scope and phase of
    ``like``."""
    weights, axes = zip(*keys, strict=True)
    params = {"permuted": axes}
    types = weight_tiles_p.output_types([v.type for v in weights], params)
    outputs = tuple(Variable(kind, v.device) for kind, v in zip(types, weights, strict=True))
    return Equation(weight_tiles_p, weights, params, outputs, like.scope, like.phase)
