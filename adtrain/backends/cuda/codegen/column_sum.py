"""Sums over rows: each thread block adds some columns, with elementwise equations before and after."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Part, indented
from adtrain.codegen.elementwise import statements, strides
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import body_of
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import Shape
from adtrain.passes.fuse_column_sums import BLOCK_COLUMNS, VECTOR, column_blocks

THREADS = 256
"""Threads of a launch of its own."""


def column_sum(equation: Equation, threads: int) -> Part:
    """The part for a `column_sum` equation."""
    body = flat(body_of(equation))
    at = next(i for i, e in enumerate(body.equations) if e.has(Trait.REDUCTION))
    total = body.equations[at]
    (x,), (y,) = total.inputs, total.outputs
    columns, c = y.size, c_type(x.type.dtype)
    names = {v: f"x{i}" for i, v in enumerate(body.inputs)} | {v: f"y{i}" for i, v in enumerate(body.outputs)}
    before = _program(body.equations[:at], [x])
    after = _program(body.equations[at + 1 :], body.outputs)
    rows = prod(x.type.shape) // columns
    load, values = _loads(before, x.type.shape, names, "row", "column", VECTOR, columns)
    read, results = _loads(after, y.type.shape, names, "0", "column", 1, columns)
    lines = [
        f"constexpr int ROWS = {rows}, COLUMNS = {columns}, WIDE = {VECTOR};",
        f"ColumnSum<{c}, THREADS, {BLOCK_COLUMNS}, WIDE> sum(block);",
        f"sum.add_rows<ROWS, COLUMNS>([&](int row, int column, {c} (&terms)[WIDE]) {{",
        *indented(load),
        "    #pragma unroll",
        "    for (int k = 0; k < WIDE; k++) {",
        *indented(indented(statements(before, values, ["terms[k]"]))),
        "    }",
        "});",
        f"sum.finish<COLUMNS>([&](int column, {c} total) {{",
        *indented(read),
        *indented(statements(after, results | {y: "total"}, [f"y{i}[column]" for i in range(len(body.outputs))])),
        "});",
    ]
    shared = threads // (BLOCK_COLUMNS // VECTOR) * (BLOCK_COLUMNS + VECTOR) * 8  # totals are float64
    headers = ("common/common.cuh", "reduce/column_sum.cuh")
    return Part(lines, body.inputs, body.outputs, headers, blocks=column_blocks(equation), shared=shared)


def _program(equations: Sequence[Equation], outputs: Sequence[Variable]) -> Program:
    """The Program of these equations; an output that none of them computes is an input too."""
    own = {v for e in equations for v in e.outputs}
    inputs = dict.fromkeys(v for e in equations for v in e.inputs if v not in own)
    inputs |= dict.fromkeys(v for v in outputs if v not in own)
    return Program(tuple(inputs), {}, tuple(equations), tuple(outputs))


def _loads(
    program: Program, shape: Shape, names: dict[Variable, str], row: str, column: str, wide: int, columns: int
) -> tuple[list[str], dict[Variable, str]]:
    """Statements that load the arguments at a row and a column, and the text of each."""
    lines, values = [], {}
    matrix = (prod(shape) // columns, columns)
    for v in program.inputs:
        if v not in names:
            continue
        name, c = names[v], c_type(v.type.dtype)
        own = v.type.shape if v.type.shape != shape else matrix
        down, across = strides(own, matrix)
        index = " + ".join([*([f"(int64_t){row} * {down}"] if down and row != "0" else []), *([column] * bool(across))])
        if across and wide > 1:
            lines.append(f"const Vector<{c}, WIDE> v{name} = load<{c}, WIDE>({name} + {index});")
            values[v] = f"v{name}.lane[k]"
        else:
            lines.append(f"const {c} v{name} = {name}[{index or '0'}];")
            values[v] = f"v{name}"
    return lines, values
