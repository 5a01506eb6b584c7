"""Grouped products: weight gradients with a long K in one launch, which divides their K evenly among all blocks.

Each alone has few tiles, so its K is split among many blocks, and a second launch adds many partial sums. Together
they have more tiles, so a tile has few partial sums. One launch adds the partial sums of all products and runs their
updates. A product with tiles for half of the multiprocessors fills the device by itself. Sums of columns share the
first launch: their blocks wait for memory while the others multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from adtrain.core.fused import column_sum_p, fuse, grouped_products_p
from adtrain.core.precision import FULL
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_horizontally import MAX_K, MAX_POINTERS, is_product, product_lengths
from adtrain.passes.groups import Groups

CAPABILITY = (9, 0)
"""The compute capability that has WGMMA."""
TILE = 128
"""Rows and columns of a tile, by which tiles are counted."""
MIN_LENGTH, VECTOR = 64, 4
"""Minimum rows and columns of a product; they are multiples of VECTOR."""
MIN_FLOPS = 1 << 32
"""Minimum FLOPs of a group. Products of fewer share a launch with other equations (`fuse_horizontally`)."""
MAX_PRODUCTS = 40
"""Maximum products of a group: their pointers are arguments of the kernel."""


def group_products(program: Program, target: Target) -> Program:
    """One `grouped_products` equation for the long products whose results no other equation reads."""
    if target.capability != CAPABILITY:
        return program
    needed = {v for e in program.equations for v in e.inputs}
    most = target.multiprocessors // 2
    products = [i for i, e in enumerate(program.equations) if needed.isdisjoint(e.outputs) and 0 < _tiles(e) < most]
    groups = Groups(program)
    sums = [i for i, e in enumerate(program.equations) if e.primitive is column_sum_p and needed.isdisjoint(e.outputs)]
    for first in range(0, len(products), MAX_PRODUCTS):
        group = products[first : first + MAX_PRODUCTS]
        if len(group) > 1 and sum(program.equations[i].cost.flops for i in group) >= MIN_FLOPS:
            added = _as_many_as_fit(program, group, sums)
            sums = [i for i in sums if i not in added]
            for i in (*group[1:], *added):  # no value leaves the group, so there is no cycle
                groups.merge(groups.of[group[0]], groups.of[i])
    return groups.rewritten(partial(fuse, grouped_products_p))


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
    fits = batch == 1 and min(m, n) >= MIN_LENGTH and m % VECTOR == n % VECTOR == 0 and k > MAX_K
    return -(-m // TILE) * -(-n // TILE) if fits else 0
