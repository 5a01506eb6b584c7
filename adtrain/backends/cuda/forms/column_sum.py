"""Sums over rows: each thread block adds some columns, with elementwise equations before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Kernel, Part, indented, kernel
from adtrain.backends.cuda.forms.column_sum_fusion import BLOCK_COLUMNS, VECTOR, column_blocks, row_axes
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.codegen.access import access, read
from adtrain.codegen.elementwise import statements
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import COLUMN_SUM, body_of
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.core.types import Shape

THREADS = 256
"""Threads of a block of a launch that computes only such sums."""
MIN_ROWS = 512
"""Minimum rows of a split."""
TOTAL, TOTAL_BYTES = "double", 8
"""The type of totals (`TotalOf` of every floating-point type), and its size."""


def column_sum_kernels(equation: Equation, target: Target) -> list[Kernel]:
    """The launches of a `column_sum` equation that shares none.

    If there are few columns, the rows are split among blocks too, and a second launch adds their totals in order.
    """
    blocks, columns = column_blocks(equation), _total(equation).outputs[0].size
    rows = prod(_total(equation).inputs[0].type.shape) // columns
    most = min(2 * target.multiprocessors // blocks, rows // MIN_ROWS)
    splits = next((s for s in range(most, 0, -1) if rows % s == 0), 1)
    made = column_sum(equation, THREADS, splits)
    if splits == 1:
        return [kernel("column_sum", [made], THREADS)]
    lines = [
        "const int column = block * THREADS + threadIdx.x;",
        f"if (column >= {columns}) return;",
        f"{TOTAL} total = 0;",
        "#pragma unroll 8",
        f"for (int i = 0; i < {splits}; i++) total += ((const {TOTAL} *)own)[i * {columns} + column];",
        *after_total(equation),
    ]
    add = replace(made, lines=lines, blocks=-(-columns // THREADS), shared=0)
    return [kernel("column_sum", [made], THREADS), kernel("column_totals", [add], THREADS)]


def column_sum(equation: Equation, threads: int, splits: int = 1) -> Part:
    """The part for a `column_sum` equation.

    Args:
        splits: into how many the rows are divided. If there are several, their totals go to scratch memory.
    """
    body = flat(body_of(equation))
    at = body.equations.index(_total(equation))
    (x,), (y,) = body.equations[at].inputs, body.equations[at].outputs
    views = {e.outputs[0]: e.inputs[0] for e in body.equations[:at] if e.has(Trait.RESHAPE)}
    while x in views:
        x = views[x]
    columns, c = y.size, c_type(x.type.dtype)
    before = _program([e for e in body.equations[:at] if not e.has(Trait.RESHAPE)], [x])
    rows, blocks = x.size // columns // splits, column_blocks(equation)
    row, block = ("(first_row + row)", f"block % {blocks}") if splits > 1 else ("row", "block")
    load, values = _loads(before, x.type.shape, columns, _names(body), row, VECTOR)
    lines = [
        f"constexpr int ROWS = {rows}, COLUMNS = {columns}, WIDE = {VECTOR};",
        *([f"const int split = block / {blocks}, first_row = split * ROWS;"] if splits > 1 else []),
        f"ColumnSum<{c}, THREADS, {BLOCK_COLUMNS}, WIDE> sum({block});",
        f"sum.add_rows<ROWS, COLUMNS>([&](int row, int column, {c} (&terms)[WIDE]) {{",
        *indented(load),
        "    #pragma unroll",
        "    for (int k = 0; k < WIDE; k++) {",
        *indented(indented(statements(before, values, ["terms[k]"]))),
        "    }",
        "});",
        f"sum.finish<COLUMNS>([&](int column, {TOTAL} total) {{",
        *indented([f"(({TOTAL} *)own)[split * COLUMNS + column] = total;"] if splits > 1 else after_total(equation)),
        "});",
    ]
    shared = threads // (BLOCK_COLUMNS // VECTOR) * (BLOCK_COLUMNS + VECTOR) * TOTAL_BYTES
    scratch = splits * columns * TOTAL_BYTES if splits > 1 else 0
    headers = ("common/common.cuh", "reduce/column_sum.cuh")
    return Part(lines, body.inputs, body.outputs, headers, blocks=blocks * splits, shared=shared, scratch=scratch)


def _total(equation: Equation) -> Equation:
    """The sum in a `column_sum` equation."""
    return next(e for e in flat(body_of(equation)).equations if e.has(Trait.REDUCTION))


def summed_matrix(equation: Equation) -> Variable | None:
    """The matrix whose columns a `column_sum` equation adds as they are in memory; None if it computes what it adds."""
    (x,) = _total(equation).inputs
    return x if x in equation.inputs and len(x.type.shape) == 2 else None


def _names(body: Program) -> dict[Variable, str]:
    return {v: f"x{i}" for i, v in enumerate(body.inputs)} | {v: f"y{i}" for i, v in enumerate(body.outputs)}


def after_total(equation: Equation) -> list[str]:
    """Statements that compute the outputs of a column from its `total`."""
    body = flat(body_of(equation))
    at = body.equations.index(_total(equation))
    (y,) = body.equations[at].outputs
    after = _program(body.equations[at + 1 :], body.outputs)
    read, results = _loads(after, y.type.shape, y.size, _names(body), "0", 1)
    outputs = [f"y{i}[column]" for i in range(len(body.outputs))]
    return [*read, *statements(after, results | {y: f"({c_type(y.type.dtype)})total"}, outputs)]


def _program(equations: Sequence[Equation], outputs: Sequence[Variable]) -> Program:
    """The Program of these equations; an output that none of them computes is an input too."""
    own = {v for e in equations for v in e.outputs}
    inputs = dict.fromkeys(v for e in equations for v in e.inputs if v not in own)
    inputs |= dict.fromkeys(v for v in outputs if v not in own)
    return Program(tuple(inputs), {}, tuple(equations), tuple(outputs))


def _loads(
    program: Program, shape: Shape, columns: int, names: dict[Variable, str], row: str, wide: int
) -> tuple[list[str], dict[Variable, str]]:
    """Statements that load the arguments at a row and `wide` columns from `column` on, and the text of each argument.

    Args:
        shape: of the results of the equations. The last axes are `columns` columns, those before them the rows.
        wide: columns that a thread computes at once. If there are several, the text reads column `column + k`.
    """
    lines, values = [], {}
    split = row_axes(shape, columns)
    assert split is not None
    for v in program.inputs:
        if v not in names:
            continue
        name, rows = names[v], (f"(int64_t){row}", split)
        found = access(v.type.shape, shape, rows, ("column", len(shape) - split))
        if found.run % wide:  # neighbours may lie in different rows of the argument
            one = access(v.type.shape, shape, rows, ("(column + k)", len(shape) - split))
            values[v] = f"{name}[{one.place}]"
        else:
            line, values[v] = read(v, f"v{name}", name, found.place, "WIDE" if found.step and wide > 1 else 1)
            lines.append(line)
    return lines, values


define(Form(COLUMN_SUM, lambda equation, lowering: column_sum_kernels(equation, lowering.target)))
