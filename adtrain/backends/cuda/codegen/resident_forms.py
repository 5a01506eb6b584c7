"""How a thread block computes an equation of resident steps: as in one-block kernels, but other products."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adtrain.backends.cuda.codegen.one_block_forms import WARP, Form, Names, Step, form_of, lanes_for, overlapped_take
from adtrain.codegen.expressions import c_type
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation

MAX_NARROW, MAX_SHORT_K = 16, 16
"""A product with no more columns, rows or K is computed without tensor cores."""
VECTOR, TILE = 4, 16
"""Elements of a vector. Rows and columns of the tile of a warp (`WarpTile` in `gemm/warp_products.cuh`)."""


def resident_form(equation: Equation) -> Form:
    """How a block computes an equation."""
    if not equation.has(Trait.MATMUL):
        return overlapped_take if equation.has(Trait.GATHER) else form_of(equation)
    m, n = equation.outputs[0].type.shape
    if min(m, n) > MAX_NARROW and _length_k(equation) > MAX_SHORT_K:
        return _warp_products
    narrow = equation.params["transpose_b"] and not equation.params["transpose_a"] and n <= MAX_NARROW
    return _narrow_product if narrow else form_of(equation)


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
