"""Map-reduce on the CPU: threads divide the rows, vector instructions compute neighbouring columns.

A tile of columns is copied to arrays, one for each number of a column, so that one instruction loads a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from adtrain.backends.cpu.codegen.text import Writer
from adtrain.codegen.elementwise import c_type
from adtrain.codegen.map_reduce import STARTS, MapReduce, join, map_reduce, value
from adtrain.core.program import Equation, Variable, body_of

TILE = 256
"""Columns of a tile. Sums of a tile are added in the type of the elements, sums of tiles in float64."""
LANES = 16
"""Columns with accumulators of their own, so that a compiler can use vectors."""
ROWS = 64
"""Rows that use a tile before the next one is copied."""


def emit_map_reduce(writer: Writer, equation: Equation, address: Callable[[Variable], str]) -> list[str]:
    """Statements that compute an equation's results. ``address`` gives a variable's memory."""
    body = body_of(equation)
    loop = map_reduce(body)
    names = {v: f"x{i}" for i, v in enumerate(body.inputs)} | {v: f"y{i}" for i, v in enumerate(body.outputs)}
    parameters = ["const Team *team"]
    parameters += [
        f"{'const ' if v in body.inputs else ''}{c_type(v.type.dtype)} *restrict {n}" for v, n in names.items()
    ]
    function = writer.function("map_reduce", ", ".join(parameters), list(_lines(loop, names)))
    return [f"{function}({', '.join(['team', *map(address, names)])});"]


def _lines(loop: MapReduce, names: dict[Variable, str]) -> Iterator[str]:
    states = [(k, s, start) for k, a in enumerate(loop.accumulators) for s, start in enumerate(STARTS[a.kind])]
    yield "int64_t begin, end;"
    yield f"my_share(team, {loop.rows}, &begin, &end);"
    for number, c, v, _, first in loop.loads(""):
        yield f"const {c} t{number} = {names[v]}[{first}];"
    yield from (f"const {c} t{number} = {text};" for number, c, text in loop.nodes(""))
    columns = loop.column_nodes()
    for number, c in columns:
        yield f"{c} c{number}[{TILE}] __attribute__((aligned(64)));"
    yield f"for (int64_t block = begin; block < end; block += {ROWS}) {{"
    yield f"    const int64_t rows = min_i64({ROWS}, end - block);"
    for k, s, start in states:
        yield f"    double total{k}_{s}[{ROWS}];"
        yield f"    for (int64_t r = 0; r < rows; r++) total{k}_{s}[r] = {start};"
    yield f"    for (int64_t tile = 0; tile < {loop.columns}; tile += {TILE}) {{"
    yield f"        const int64_t columns = min_i64({TILE}, {loop.columns} - tile);"
    yield "        for (int64_t j = 0; j < columns; j++) {"
    for number, c, v, step, first in loop.loads("j"):
        yield f"            const {c} t{number} = {names[v]}[(tile + j) * {step} + {first}];"
    yield from (f"            const {c} t{number} = {text};" for number, c, text in loop.nodes("j"))
    yield from (f"            c{number}[j] = t{number};" for number, _ in columns)
    yield "        }"
    yield "        for (int64_t r = 0; r < rows; r++) {"
    yield from (f"            {line}" for line in _row(loop, names))
    yield "        }"
    yield "    }"
    yield "    for (int64_t r = 0; r < rows; r++) {"
    for result in loop.results:
        a = loop.accumulators[result.accumulator]
        total = value(a.kind, [f"total{result.accumulator}_{s}[r]" for s in range(len(STARTS[a.kind]))])
        yield f"        {names[result.output]}[(block + r) * {result.step} + {result.first}] = {result.value(total)};"
    yield "    }"
    yield "}"


def _row(loop: MapReduce, names: dict[Variable, str]) -> Iterator[str]:
    """Statements that join a tile's columns to a row's totals."""
    for number, c, v, step, first in loop.loads("i"):
        yield f"const {c} t{number} = {names[v]}[(block + r) * {step} + {first}];"
    yield from (f"const {c} t{number} = {text};" for number, c, text in loop.nodes("i"))
    for k, a in enumerate(loop.accumulators):
        for s, start in enumerate(STARTS[a.kind]):
            yield f"{c_type(a.dtype)} part{k}_{s}[{LANES}];"
            yield f"for (int l = 0; l < {LANES}; l++) part{k}_{s}[l] = {start};"
    yield "int64_t j = 0;"
    yield f"for (; j + {LANES} <= columns; j += {LANES}) {{"
    yield "    #pragma omp simd"
    yield f"    for (int l = 0; l < {LANES}; l++) {{"
    yield from (f"        {line}" for line in _terms(loop))
    yield "    }"
    yield "}"
    yield "for (int l = 0; j + l < columns; l++) {"
    yield from (f"    {line}" for line in _terms(loop))
    yield "}"
    yield f"for (int l = 0; l < {LANES}; l++) {{"
    for k, a in enumerate(loop.accumulators):
        slots = range(len(STARTS[a.kind]))
        lines = join(a.kind, "double", [f"total{k}_{s}[r]" for s in slots], [f"part{k}_{s}[l]" for s in slots])
        yield from (f"    {line}" for line in lines)
    yield "}"


def _terms(loop: MapReduce) -> Iterator[str]:
    """Statements that join column j + l to lane l."""
    yield from (f"const {c} t{number} = c{number}[j + l];" for number, c in loop.column_nodes())
    yield from (f"const {c} t{number} = {text};" for number, c, text in loop.nodes("ij"))
    for k, a in enumerate(loop.accumulators):
        states = [f"part{k}_{s}[l]" for s in range(len(STARTS[a.kind]))]
        yield from loop.folded(a, states)
