"""Grouped products: weight gradients with a long K in one launch, which divides their K evenly among all blocks.

Each alone has few tiles, so its K is split among many blocks, and a second launch adds many partial sums. Together
they have more tiles, so a tile has few partial sums. One launch adds the partial sums of all products and runs their
updates. A product with tiles for half of the multiprocessors fills the device by itself. Sums of columns share the
first launch. If a product loads the same matrix, as for a bias gradient, its blocks add the columns. Other sums have
their own blocks, which wait for memory while the others multiply.

A product of few columns, such as the weight gradient of a first layer, fills only a part of a tile. But alone it would
have two launches for little work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from adtrain.backends.cuda.forms.horizontal_fusion import MAX_K, MAX_POINTERS, is_product, product_lengths
from adtrain.core.fused import COLUMN_SUM, GROUPED_PRODUCTS, fuse, renamed
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.core.types import Shape
from adtrain.passes.groups import Groups

CAPABILITY = (9, 0)
"""The compute capability that has WGMMA."""
TILE = 128
"""Rows and columns of a tile, by which tiles are counted."""
MIN_LENGTH, VECTOR = 64, 4
"""Minimum rows and columns of a product; they are multiples of VECTOR. MIN_LENGTH is NARROW in `gemm_bf16x3.cuh`."""
MIN_NARROW = 32
"""Minimum columns of a narrow product, which has fewer than MIN_LENGTH. They need not be a multiple of VECTOR. With
fewer columns most of a tile would be empty."""
MIN_FLOPS = 1 << 32
"""Minimum FLOPs of a group. Products of fewer share a launch with other equations (`fuse_horizontally`)."""
MAX_ELEMENTS = 1 << 30
"""Maximum elements of a matrix. The offsets in `gemm_bf16x3.cuh` have 32 bits, and exceed the end by up to a tile."""
MAX_PRODUCTS = 40
"""Maximum products of a group: their pointers are arguments of the kernel."""


def group_products(program: Program, target: Target) -> Program:
    """One `grouped_products` equation for the long products whose results no other equation reads."""
    if not _product_groups(program, target):
        return program
    program = _with_shared_views(program)
    needed = {v for e in program.equations for v in e.inputs}
    sums = [i for i, e in enumerate(program.equations) if e.form == COLUMN_SUM and needed.isdisjoint(e.outputs)]
    groups = Groups(program)
    for products in _product_groups(program, target):
        added = _as_many_as_fit(program, products, sums)
        sums = [i for i in sums if i not in added]
        for i in (*products[1:], *added):  # no value leaves the group, so there is no cycle
            groups.merge(groups.of[products[0]], groups.of[i])
    return groups.rewritten(partial(fuse, GROUPED_PRODUCTS))


def _product_groups(program: Program, target: Target) -> list[list[int]]:
    """The positions of the products of each group: long ones whose results no other equation reads."""
    if target.capability != CAPABILITY:
        return []
    needed = {v for e in program.equations for v in e.inputs}
    most = target.multiprocessors // 2
    found = [i for i, e in enumerate(program.equations) if needed.isdisjoint(e.outputs) and 0 < _tiles(e) < most]
    groups = [found[first : first + MAX_PRODUCTS] for first in range(0, len(found), MAX_PRODUCTS)]
    return [g for g in groups if len(g) > 1 and sum(program.equations[i].cost.flops for i in g) >= MIN_FLOPS]


def _with_shared_views(program: Program) -> Program:
    """The Program in which long products and sums of columns read the first of equal reshapes, to share arguments.

    Other equations keep their reshapes: a fused one may read two equal reshapes, and its inputs must be distinct.
    """
    first: dict[Variable, Variable] = {}
    known: dict[tuple[Variable, Shape], Variable] = {}
    equations = []
    for e in program.equations:
        if _tiles(e) or e.form == COLUMN_SUM:
            e = renamed(e, first)
        elif e.has(Trait.RESHAPE):
            (x,), (y,) = e.inputs, e.outputs
            first[y] = known.setdefault((x, y.type.shape), y)
        equations.append(e)
    return replace(program, equations=tuple(equations))


def _as_many_as_fit(program: Program, products: Sequence[int], sums: Sequence[int]) -> list[int]:
    """The first of the sums of columns, as many as the arguments of a kernel allow beside those of the products."""
    pointers = {v for i in products for v in _arguments(program.equations[i])}
    found = []
    for i in sums:
        more = pointers | _arguments(program.equations[i])
        if len(more) <= MAX_POINTERS:
            found.append(i)
            pointers = more
    return found


def _arguments(equation: Equation) -> set[Variable]:
    return {*equation.inputs, *equation.outputs}


def _tiles(equation: Equation) -> int:
    """The tiles of a product that can be in a group; 0 for any other equation."""
    if not is_product(equation):
        return 0
    matmul = equation.params["body"].equations[0] if "body" in equation.params else equation
    a, _ = matmul.inputs
    options = matmul.params["transpose_a"], matmul.params["transpose_b"], matmul.params["precision"]
    if a.type.dtype.name != "float32" or options != (True, False, FULL):
        return 0
    batch, m, n, k = product_lengths(equation)
    right_columns = MIN_NARROW <= n < MIN_LENGTH or (n >= MIN_LENGTH and n % VECTOR == 0)
    suits = batch == 1 and m >= MIN_LENGTH and m % VECTOR == 0 and right_columns and k > MAX_K
    fits = suits and max(m, n) * k < MAX_ELEMENTS
    return -(-m // TILE) * -(-n // TILE) if fits else 0
