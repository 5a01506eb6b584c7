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

from collections.abc import Iterable, Sequence
from dataclasses import replace

from adtrain.backends.cuda.forms.horizontal_fusion import MAX_K, MAX_POINTERS, is_product, product_lengths
from adtrain.core.fused import COLUMN_SUM, GROUPED_PRODUCTS, renamed
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.core.types import Shape
from adtrain.passes.fusion import Fusion
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
"""Minimum FLOPs of a group. Products of fewer share a launch with other equations (`fuse_horizontal`)."""
MAX_ELEMENTS = 1 << 30
"""Maximum elements of a matrix. The offsets in `gemm_bf16x3.cuh` have 32 bits, and exceed the end by up to a tile."""
MAX_PRODUCTS = 40
"""Maximum products of a group: their pointers are arguments of the kernel."""


class GroupedProductsFusion(Fusion):
    """The long products whose results no other equation reads, and sums of columns beside them."""

    form = GROUPED_PRODUCTS

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return target.capability == CAPABILITY

    def prepared(self) -> Program:
        return _with_shared_views(self.program) if self._product_groups() else self.program

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        sums = [i for i in self._unread() if self.program.equations[i].form == COLUMN_SUM]
        for products in self._product_groups():
            added = _as_many_as_fit(self.program, products, sums)
            sums = [i for i in sums if i not in added]
            yield (*products, *added)

    def _unread(self) -> list[int]:
        """The positions of the equations whose results no other equation reads."""
        needed = {v for e in self.program.equations for v in e.inputs}
        return [i for i, e in enumerate(self.program.equations) if needed.isdisjoint(e.outputs)]

    def _product_groups(self) -> list[list[int]]:
        """The positions of the products of each group."""
        equations, most = self.program.equations, self.target.multiprocessors // 2
        found = [i for i in self._unread() if 0 < _tiles(equations[i]) < most]
        groups = [found[first : first + MAX_PRODUCTS] for first in range(0, len(found), MAX_PRODUCTS)]
        return [g for g in groups if len(g) > 1 and sum(equations[i].cost.flops for i in g) >= MIN_FLOPS]


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
