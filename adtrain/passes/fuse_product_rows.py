"""Product-row fusion: a matrix product and the norm, or gradient of a norm, that reads its rows, as one kernel.

A thread block computes whole rows of the product. So their means and sums need no further launch, and the product is
not read again. In a transformer these are the norms after a residual sum, and the gradients of norms before a linear
layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from adtrain.core.fused import body_of, fuse, product_p, product_rows_p, row_fused_p
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.core.types import Shape
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.groups import Groups

CAPABILITY = (9, 0)
"""The compute capability that has WGMMA."""
ROWS = 64
"""Rows of a thread block."""
MIN_COLUMNS, MAX_COLUMNS, VECTOR = 100, 128, 4
"""Columns of a product, a multiple of VECTOR. A tile has the maximum; for fewer columns there are narrower tiles."""
MIN_K = 64
MAX_ELEMENTS = 1 << 30
"""Maximum elements of an operand and of the product."""
FORMS = frozenset(("sum", "max", "min", "argmax", "softmax", "log_softmax", "standardize"))
"""The primitives along rows that the code generator has code for, besides elementwise ones and reshapes."""


def fuse_product_rows(program: Program, target: Target) -> Program:
    """One `product_rows` equation for a product and the `row_fused` equation that reads it."""
    if target.capability != CAPABILITY:
        return program
    groups = Groups(program)
    for i, e in enumerate(program.equations):
        for v in e.inputs if e.primitive is row_fused_p else ():
            p = groups.producer.get(v)
            if p is None or len(groups.members[groups.of[p]]) > 1 or len(groups.members[groups.of[i]]) > 1:
                continue
            product = program.equations[p]
            if _fills(product, target) and _by_rows(e, v.type.shape) and groups.can_merge(p, i):
                groups.merge(p, i)
    return groups.rewritten(_fused)


def rows_after(equation: Equation) -> Program:
    """The equations of a `product_rows` equation after the product, which is their first input."""
    body = body_of(equation)
    product, *others = body.equations
    made = {v for e in others for v in e.outputs}
    inputs = dict.fromkeys(v for e in others for v in e.inputs if v not in made)
    return Program(tuple(dict.fromkeys((*product.outputs, *inputs))), {}, tuple(others), body.outputs)


def _fills(e: Equation, target: Target) -> bool:
    """Whether an equation is a product whose blocks of whole rows fill at least half of the multiprocessors."""
    product = body_of(e).equations[0] if e.primitive is product_p else e
    if not product.has(Trait.MATMUL) or product.params["precision"] != FULL:
        return False
    a, c = product.inputs[0].type, product.outputs[0].type
    if len(c.shape) != 2 or c.dtype.name != "float32" or any(v.type.shape != c.shape for v in e.outputs):
        return False
    (m, n), k = c.shape, a.shape[0 if product.params["transpose_a"] else 1]
    fits = MIN_COLUMNS <= n <= MAX_COLUMNS and n % VECTOR == 0 and k >= MIN_K
    return fits and m * max(n, k) < MAX_ELEMENTS and -(-m // ROWS) >= target.multiprocessors // 2


def _by_rows(e: Equation, shape: Shape) -> bool:
    """Whether the code generator has code for all equations of a `row_fused` equation on rows of a matrix."""
    by_row = (shape, shape[:1], (*shape[:1], 1))

    def has_form(inner: Equation) -> bool:
        along_rows = inner.primitive.name in FORMS and inner.inputs[0].type.shape == shape
        known = along_rows or by_element(inner) or inner.has(Trait.RESHAPE)
        return known and all(v.type.shape in by_row for v in inner.outputs)

    return all(map(has_form, body_of(e).equations))


def _fused(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    return fuse(product_rows_p, [inner for e in equations for inner in body_of(e).equations], needed)
