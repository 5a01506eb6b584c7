"""How a thread block computes an equation of resident steps: as in one-block kernels, but other products and rows.

Equations that work row by row are fused, and the lanes of a row hold it in registers. A product is fused with the
elementwise equation that reads it, if the same thread has an element in both. So no barriers separate them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from adtrain.backends.cuda.codegen.block_rules import REDUCTIONS, matmul, overlapped_take, reduction, rule_of
from adtrain.backends.cuda.codegen.part import Names, Step, StepRule, lanes_for
from adtrain.backends.cuda.codegen.register_rows import rows_in_block, takes_numbers
from adtrain.backends.cuda.forms.resident_layer import THREADS
from adtrain.backends.cuda.forms.row_fused import ROW_FUSED, RowFusion, rowwise
from adtrain.codegen.elementwise import c_type
from adtrain.core.axes import Items
from adtrain.core.kernel import WARP
from adtrain.core.primitive import Trait
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of
from adtrain.passes.fusion import EpilogueFusion, FusionPass

BESIDE = 8
"""Vectors of columns that a warp reduces side by side."""
MAX_NARROW, MAX_SHORT_K = 16, 16
"""A product with no more columns, rows or K is computed without tensor cores."""
TALL = 2
"""Rows of the tile of a lane, in a product whose left operand is transposed."""
VECTOR, TILE = 4, 16
"""Elements of a vector. Rows and columns of the tile of a warp (`WarpTile` in `gemm/resident_layer.cuh`)."""


class _RowsInBlock(RowFusion):
    """Row-wise equations without products, which a thread block computes for all rows."""

    form = ROW_FUSED

    def row_wise(self) -> list[Items | None]:
        return [_by_row(e) for e in self.program.equations]


class _ShortProducts(EpilogueFusion):
    """The products whose epilogue runs on the registers of the threads that computed them."""

    form = PRODUCT

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        return _is_short(product, THREADS)


def fused(segment: Program) -> Program:
    """The equations of a segment, with rows and products fused."""
    rows = FusionPass((_RowsInBlock,))(segment)
    equations = [x for e in rows.equations for x in _unless_rows(e)]
    return FusionPass((_ShortProducts,))(replace(rows, equations=tuple(equations)))


def _by_row(equation: Equation) -> Items | None:
    """How it works row by row; None if it does not."""
    return equation.items if takes_numbers(equation) else rowwise(equation)


def _unless_rows(equation: Equation) -> Sequence[Equation]:
    """The equation. If it fuses rows that do not fit in registers: the equations in it."""
    if equation.form != ROW_FUSED:
        return (equation,)
    body = body_of(equation)
    names = dict.fromkeys((*body.inputs, *body.outputs), "")
    return (equation,) if rows_in_block(body, names, THREADS) else body.equations


def resident_rule(equation: Equation) -> StepRule:
    """How a block computes an equation."""
    if equation.form == ROW_FUSED:
        return _rows
    if equation.form == PRODUCT:
        return _product
    if equation.primitive.name in REDUCTIONS:
        return partial(reduction, op=REDUCTIONS[equation.primitive.name], by_columns=_in_warps)
    if not equation.has(Trait.MATMUL):
        return overlapped_take if equation.has(Trait.GATHER) else rule_of(equation)
    m, n = equation.outputs[0].type.shape
    if min(m, n) > MAX_NARROW and _length_k(equation) > MAX_SHORT_K:
        return _warp_products
    if equation.params["transpose_a"] and min(m, n) >= VECTOR:
        return _transposed_product
    narrow = equation.params["transpose_b"] and not equation.params["transpose_a"] and n <= MAX_NARROW
    return _narrow_product if narrow else _matmul


def _matmul(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    return matmul(equation, names, threads, _in_warps)


def _in_warps(
    op: str, y: Variable, count: int, slices: int, wide: int, read: str, names: Names, threads: int
) -> Sequence[Step]:
    """A reduction of columns by the lanes of a warp. It writes no partial results, so it needs no barrier."""
    columns, a = y.size // wide, c_type(y.type.dtype)
    beside = max(min(1 << (columns - 1).bit_length(), BESIDE), WARP >> (count.bit_length() - 1))
    lines = [
        f"in_block::reduce_columns<{op}, {a}, THREADS, {y.size}, {count}, {WARP // beside}, {wide}>(t,",
        f"    [&](int o, int r) {{ {read} }},",
        f"    [&](int o, {a} value) {{ {names[y]}[o] = value; }});",
    ]
    return [Step(lines, min(-(-columns // beside) * WARP, threads))]


def _rows(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    step = rows_in_block(body_of(equation), names, threads)
    assert step is not None, "rows without a rule are not fused"
    return [step]


def _is_short(equation: Equation, threads: int) -> bool:
    """Whether it is a product of short K in which thread t computes elements t, t + threads, ..., as in a loop."""
    if not equation.has(Trait.MATMUL) or equation.params["transpose_a"] or _length_k(equation) > MAX_SHORT_K:
        return False
    n = equation.outputs[0].type.shape[1]
    return threads % n == 0 and threads >= 2 * n and resident_rule(equation) is _matmul


def _product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A product and the elementwise equation that reads it. The product is stored where the result will be."""
    product, reader = body_of(equation).equations
    names = {product.outputs[0]: names[reader.outputs[0]], **names}
    (first,), (last,) = (resident_rule(e)(e, names, threads) for e in (product, reader))
    return [Step([*first.lines, *last.lines], first.threads)]


def _length_k(equation: Equation) -> int:
    return equation.inputs[0].size // equation.outputs[0].type.shape[0]


def _narrow_product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A product of few columns by a transposed matrix. Lanes that share a row keep it in registers for all columns."""
    (a, b), (y,) = equation.inputs, equation.outputs
    (m, n), k = y.type.shape, a.type.shape[1]
    wide = math.gcd(16 // y.type.dtype.itemsize, k)
    lanes = math.gcd(lanes_for(k // wide, m, threads), k // wide)
    numbers = f"{c_type(y.type.dtype)}, THREADS, {m}, {n}, {k}, {lanes}, {wide}"
    line = f"in_block::narrow_products<{numbers}>(t, {', '.join(names[v] for v in (a, b, y))});"
    return [Step([line], min(m * lanes, threads))]


def _transposed_product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A small product whose left operand is transposed. Each lane of a warp computes a tile of outputs."""
    (a, b), (y,) = equation.inputs, equation.outputs
    (m, n), k = y.type.shape, a.type.shape[0]
    tall, wide = math.gcd(TALL, m), math.gcd(16 // y.type.dtype.itemsize, n)
    lanes = math.gcd(WARP // BESIDE, k)
    numbers = f"{c_type(y.type.dtype)}, THREADS, {m}, {n}, {k}, {lanes}, {tall}, {wide}"
    line = f"in_block::transposed_products<{numbers}>(t, {', '.join(names[v] for v in (a, b, y))});"
    return [Step([line], min(-(-y.size // (tall * wide * WARP // lanes)) * WARP, threads))]


def _warp_products(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A product on tensor cores."""
    (a, b), (y,) = equation.inputs, equation.outputs
    (m, n), k = y.type.shape, _length_k(equation)
    transpose_a, transpose_b = bool(equation.params["transpose_a"]), bool(equation.params["transpose_b"])
    flags = ", ".join(str(flag).lower() for flag in (transpose_a, transpose_b))
    wide_a, wide_b = (math.gcd(VECTOR, length) for length in (m if transpose_a else k, k if transpose_b else n))
    pointers = ", ".join(names[v] for v in (a, b, y))
    line = f"warp_products<THREADS, {flags}, {wide_a}, {wide_b}>(t, {pointers}, {m}, {n}, {k});"
    return [Step([line], min(-(-m // TILE) * -(-n // TILE) * WARP, threads))]
