"""Row-product fusion: a chain of linear layers, norms, activations and residual additions on few rows as one kernel.

A thread block takes ROWS rows through all equations of the chain, with products on tensor cores. Values between equations
stay in shared memory, and each block reads every weight. Launches of their own would cost more where rows are few: in a
transformer all that lies between two attentions is one such chain, forward and backward.
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.fused import body_of, fuse, row_products_p
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.batchwise import Batchwise, rowwise
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.fuse_one_block import FORMS
from adtrain.passes.fuse_products import fuse_products
from adtrain.passes.fuse_rows import merged_rows

ROWS = 16
"""Rows of a thread block: those of a tensor-core instruction."""
MIN_CAPABILITY = (8, 0)
"""Compute capability with bfloat16 on tensor cores."""
MAX_WIDTH = 1024
"""Maximum elements of a row."""
MAX_WEIGHT = 1 << 17
"""Maximum elements of a weight, which every block reads."""
STRIP, STEP = 32, 16
"""Columns and K of a warp's tile; a weight's lengths are multiples of them."""


def fuse_row_products(program: Program, target: Target) -> Program:
    """One `row_products` equation for each connected group of row-wise equations with wide products."""
    if target.capability < MIN_CAPABILITY:
        return program
    found = [_by_row(e, target) for e in program.equations]
    groups = merged_rows(program, found, range(len(found)))
    chosen = {i for m in groups.members.values() if _is_chain([program.equations[i] for i in m]) for i in m}
    return merged_rows(program, found, chosen).rewritten(_fused)


def is_wide_product(equation: Equation) -> bool:
    """Whether a row-product kernel computes a product by tensor cores: rows by a weight that all blocks read."""
    e = equation
    if not e.has(Trait.MATMUL) or e.params["transpose_a"] or e.params["precision"] != FULL:
        return False
    a, b = e.inputs
    if len(a.type.shape) != 2 or a is b or a.type.dtype.name != "float32" or b.size > MAX_WEIGHT:
        return False
    (_, k), n = a.type.shape, e.outputs[0].type.shape[1]
    return n % STRIP == 0 and k % STEP == 0 and max(n, k) <= MAX_WIDTH


def shared_by_blocks(body: Program) -> set[Variable]:
    """The inputs of a `row_products` body that every thread block reads completely."""
    count = body.outputs[0].type.shape[0]
    inner = [e for fused in body.equations for e in body_of(fused).equations]
    weights = {e.inputs[1] for e in inner if e.has(Trait.MATMUL)}
    return {v for v in body.inputs if v in weights or v.type.shape[:1] != (count,)}


def _by_row(e: Equation, target: Target) -> Batchwise | None:
    """How an equation works on the rows of a matrix, where there are enough rows for most multiprocessors, and not more."""
    if e.has(Trait.MATMUL):
        found = Batchwise(e.outputs[0].type.shape[0], (True, False), False) if is_wide_product(e) else None
    elif e.has(Trait.RESHAPE) or elementwise(e) or e.primitive.name in FORMS or e.primitive.name == "standardize":
        found = rowwise(e)
    else:
        found = rowwise(e) if "body" in e.params else None
    if found is None or found.count % ROWS or any(len(v.type.shape) > 2 for v in (*e.inputs, *e.outputs)):
        return None
    blocks = found.count // ROWS
    fits = target.multiprocessors // 2 <= blocks <= target.multiprocessors
    by_row = [v for v, flag in zip(e.inputs, found.flags, strict=True) if flag]
    wide = any(v.size > MAX_WIDTH * found.count for v in (*by_row, *e.outputs))
    return found if fits and not wide else None


def _is_chain(equations: list[Equation]) -> bool:
    launches = [e for e in equations if not e.has(Trait.RESHAPE)]
    return len(launches) > 1 and any(e.has(Trait.MATMUL) for e in launches)


def _fused(equations: list[Equation], needed: list[Variable]) -> Equation:
    chain = fuse(row_products_p, equations, needed)
    return replace(chain, params={"body": fuse_products(chain.params["body"])})


