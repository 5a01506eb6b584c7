"""Row-fused kernels: each thread block takes its own rows through all equations of a body."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from adtrain.backends.cuda.codegen.part import Kernel, Part, indented, kernel
from adtrain.backends.cuda.codegen.register_rows import THREADS, register_rows
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.one_block import names_of, part_of
from adtrain.backends.cuda.forms.row_fused_fusion import shared_inputs
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import ROW_FUSED, body_of
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.core.types import ArrayType

if TYPE_CHECKING:
    from adtrain.backends.cuda.lower import Lowering

BLOCKS = 2
"""Most thread blocks for each multiprocessor, where the number of rows divides evenly."""


MEMBER_ROWS, MEMBER_RESIDENT = 8, 4
"""In a Program by member: minimum rows of a block; blocks for which a multiprocessor must have registers."""


def row_fused(equation: Equation, target: Target) -> Part:
    """The part for a `row_fused` equation."""
    body = body_of(equation)
    if in_registers := register_rows(body):
        return in_registers
    count = body.outputs[0].type.shape[0]
    rows = rows_per_block(count, target)
    return own_rows(body, {count: rows}, shared_inputs(body), lambda own, names: part_of(own, names, THREADS))


def own_rows(
    body: Program,
    rows: Mapping[int, int],
    whole: Collection[Variable],
    part_for: Callable[[Program, dict[Variable, str]], Part],
) -> Part:
    """The part in which each block computes a body for its own rows.

    Args:
        rows: maps the length of axis 0 of a variable to its length in a block.
        whole: the inputs that every block reads completely.
        part_for: returns the part for a body of so many rows, with the pointers to its values.
    """
    own = _sliced(body, {v: v for v in whole}, rows)
    names = names_of(own)
    lines = []
    for kind, variables in (("x", own.inputs), ("y", own.outputs)):
        for i, v in enumerate(variables):
            if v not in whole:
                pointer = f"{'const ' if kind == 'x' else ''}{c_type(v.type.dtype)} *const"
                lines.append(f"{pointer} my{kind}{i} = {kind}{i} + (int64_t)block * {v.size};")
                names |= {w: f"my{kind}{i}" for w, name in names.items() if name == f"{kind}{i}"}
    part = part_for(own, names)
    if part.scratch:
        lines += ["char *const all = own;", "{", f"    char *const own = all + (int64_t)block * {part.scratch};"]
        lines += [*indented(part.lines), "}"]
    else:
        lines += part.lines
    count, each = next(iter(rows.items()))
    blocks = count // each
    scratch = part.scratch * blocks
    return replace(part, lines=lines, inputs=body.inputs, outputs=body.outputs, blocks=blocks, scratch=scratch)


def rows_per_block(count: int, target: Target) -> int:
    """Rows of a thread block: the least divisor of `count` that gives at most BLOCKS blocks for each multiprocessor.

    1 where that divisor would be more than twice what BLOCKS needs.
    """
    if target.by_member:  # other members fill the device
        return next(n for n in range(min(MEMBER_ROWS, count), count + 1) if count % n == 0)
    most = BLOCKS * target.multiprocessors
    least = next(n for n in range(1, count + 1) if count % n == 0 and count // n <= most)
    return least if least <= 1 + 2 * count // most else 1


def _sliced(body: Program, known: dict[Variable, Variable], rows: Mapping[int, int]) -> Program:
    """The body for some of its rows; `known` maps variables that are sliced already, or stay whole."""

    def sliced(v: Variable) -> Variable:
        if v not in known:
            shape = v.type.shape
            cut = (rows.get(shape[0], shape[0]), *shape[1:]) if shape else ()
            known[v] = Variable(ArrayType(cut, v.type.dtype), v.device)
        return known[v]

    def equation(e: Equation) -> Equation:
        fused = e.form
        params = {**e.params, "body": _sliced(e.params["body"], known, rows)} if fused else e.params
        return replace(e, inputs=tuple(map(sliced, e.inputs)), outputs=tuple(map(sliced, e.outputs)), params=params)

    inputs = tuple(map(sliced, body.inputs))
    return Program(inputs, {}, tuple(map(equation, body.equations)), tuple(map(sliced, body.outputs)))


def _kernels(equation: Equation, lowering: Lowering) -> list[Kernel]:
    resident = MEMBER_RESIDENT if lowering.target.by_member else 1
    return [kernel("row_fused", [row_fused(equation, lowering.target)], THREADS, resident=resident)]


define(Form(ROW_FUSED, _kernels))
