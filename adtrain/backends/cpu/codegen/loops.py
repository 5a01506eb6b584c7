"""Loop nests and the epilogues of matrix products: C for groups of elementwise equations, and for map-reduce.

A loop nest reads each argument once and writes each result once. An epilogue has the loops that run on each finished
block of a product.

In a map-reduce threads divide the rows, and vector instructions compute neighbouring columns. A tile of columns is
copied to arrays, one for each number of a column, so that one instruction loads a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from adtrain.backends.cpu.codegen.text import Writer
from adtrain.backends.cpu.compiler import Source
from adtrain.backends.cpu.fusions import kernels
from adtrain.codegen.elementwise import Axis, access, axes_of, c_type, offset, place, pointer, read, statements
from adtrain.codegen.map_reduce import STARTS, MapReduce, join, map_reduce, value
from adtrain.core.kernel import value_for
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of

FEW_ROWS = 32
"""Minimum rows that threads divide. With fewer they divide each row."""
FEW_ELEMENTS = 1024
"""One thread computes up to this number of elements: starting the others takes longer."""


def by_one_thread(body: Program) -> bool:
    """Whether a body's elements are too few to be divided among threads."""
    return body.outputs[0].size <= FEW_ELEMENTS


def team_loops(writer: Writer, body: Program) -> str:
    """A function ``(team, inputs..., outputs...)`` whose elements the threads divide."""
    axes = axes_of(body)
    nest = _Nest(body, axes)
    parameters = f"const Team *team, {_parameters(body)}"
    inner, rows = (axes[-1].length if axes else 1), math.prod(axis.length for axis in axes[:-1])
    if by_one_thread(body):
        lines = ["if (team->thread > 0)", "    return;", *nest.lines("0", str(rows), "0", str(inner))]
        return writer.function("loops", parameters, lines)
    share = "int64_t begin, end;"
    if rows >= FEW_ROWS:
        divided = [share, f"my_share(team, {rows}, &begin, &end);", *nest.lines("begin", "end", "0", str(inner))]
    else:
        divided = [share, f"my_cache_lines(team, {inner}, &begin, &end);", *nest.lines("0", str(rows), "begin", "end")]
    return writer.function("loops", parameters, divided)


def item_loops(writer: Writer, body: Program, items: int) -> str:
    """A function ``(inputs..., outputs...)`` that computes `items` items, with pointers to the first one's elements."""
    axes = axes_of(body, items)
    nest = _Nest(body, axes)
    inner, rows = (axes[-1].length if axes else 1), math.prod(axis.length for axis in axes[:-1])
    return writer.function("item_loops", _parameters(body), nest.lines("0", str(rows), "0", str(inner)))


def some_item_loops(writer: Writer, body: Program) -> str:
    """A function ``(inputs..., outputs..., items)`` like `item_loops` that computes any number of items."""
    two, three = axes_of(body, 2), axes_of(body, 3)
    lengths = [str(a.length) if a == b else f"items * {a.length // 2}" for a, b in zip(two, three, strict=True)]
    nest = _Nest(body, two)
    rows = " * ".join(lengths[:-1]) or "1"
    return writer.function("item_loops", f"{_parameters(body)}, int64_t items", nest.lines("0", rows, "0", lengths[-1]))


def _parameters(body: Program) -> str:
    inputs = [f"{pointer(v, const=True)}x{i}" for i, v in enumerate(body.inputs)]
    return ", ".join(inputs + [f"{pointer(v)}y{i}" for i, v in enumerate(body.outputs)])


@dataclass(frozen=True)
class _Nest:
    """The loops over a body's elements; all axes but the last are rows."""

    body: Program
    axes: Sequence[Axis]

    def lines(self, row: str, rows: str, column: str, columns: str) -> list[str]:
        """C for the rows and columns between these bounds."""
        values: dict[Variable, str] = {}
        before: list[str] = []
        at_row: list[str] = []
        at = [(f"i{k}", [axis]) for k, axis in enumerate(self.axes[:-1])]
        for i, v in enumerate(self.body.inputs):
            outer, inner = place(at, i), self.axes[-1].strides[i] if self.axes else 0
            if inner:
                values[v] = f"p{i}[j]" if inner == 1 else f"p{i}[j * {inner}]"
                # gcc 12 does not vectorise bool, but it does bytes, which are 0 and 1
                kind = "const uint8_t *" if v.type.dtype.kind == "b" else pointer(v, const=True)
                at_row.append(f"{kind}p{i} = ({kind})(x{i} + {outer});")
            else:
                line, values[v] = read(v, f"a{i}", f"x{i}", outer)
                (before if outer == "0" else at_row).append(line)
        results = []
        for i, v in enumerate(self.body.outputs):
            outer = place(at, len(self.body.inputs) + i)
            at_row.append(f"{pointer(v)}q{i} = y{i} + {outer};")
            results.append(f"q{i}[j]")
        loop = ["#pragma omp simd", f"for (int64_t j = {column}; j < {columns}; j++) {{"]
        loop += [f"    {line}" for line in statements(self.body, values, results)] + ["}"]
        if len(self.axes) < 2:
            return [*before, *at_row, *loop]
        inside = [*self._indices(), *at_row, *loop]
        return [
            *before,
            f"for (int64_t row = {row}; row < {rows}; row++) {{",
            *(f"    {line}" for line in inside),
            "}",
        ]

    def _indices(self) -> list[str]:
        """C that splits the row's number into the outer loops' indices."""
        lengths = [axis.length for axis in self.axes[:-1]]
        units = [[int(k == other) for other in range(len(lengths))] for k in range(len(lengths))]
        return [f"const int64_t i{k} = {offset('row', lengths, unit)};" for k, unit in enumerate(units)]


MAX_AHEAD = 8
"""The most arrays of an epilogue that a product prefetches, as in kernels/cpu/gemm.h."""


def emit_product(writer: Writer, equation: Equation, place: Callable[[Variable], str]) -> list[str]:
    """The lines of a function of the team that computes a matrix product, with its epilogue if it has one."""
    product, epilogue = equation, None
    if equation.form == PRODUCT:
        body: Program = equation.params["body"]
        product, loops = body.equations
        epilogue = body_of(loops)
    (c,) = product.outputs
    target = place(c) if c in equation.outputs else "NULL"
    (kernel,) = (k for k in kernels(product) if k.team)
    types = [v.type for v in product.inputs]
    source = Source(kernel.file, kernel.element_types(*types, **product.kernel_params))
    name = writer.name(kernel, product, types)
    writer.called[name] = None
    writer.scratch = max(writer.scratch, value_for(kernel.scratch, *types, **product.kernel_params))
    t = c_type(source.dtypes[0])
    struct = _declare_epilogue(writer, t, source.suffix)
    numbers = [str(int(x)) for x in value_for(kernel.numbers, *types, **product.kernel_params)]
    arguments = ["const Team *", f"const {t} *", f"const {t} *", f"{t} *", *("int64_t" for _ in numbers)]
    writer.prototypes[f"void {name}({', '.join(arguments)}, const {struct} *);"] = None
    a, b = map(place, product.inputs)
    before = _epilogue(writer, epilogue, product.outputs[0], struct, place) if epilogue else []
    return [*before, f"{name}(team, {', '.join([a, b, target, *numbers, '&epilogue' if epilogue else 'NULL'])});"]


def _declare_epilogue(writer: Writer, t: str, suffix: str) -> str:
    """The name of the epilogue's type, as in kernels/cpu/gemm.h, for one element type."""
    numbers = ", ".join(["int64_t"] * 5)
    writer.prototypes[
        f"typedef struct {{ void (*function)(void *, const {t} *, {numbers}); void *context; "
        f"const {t} *ahead[{MAX_AHEAD}]; int64_t ahead_count; }} Epilogue{suffix};"
    ] = None
    return f"Epilogue{suffix}"


def _epilogue(
    writer: Writer, body: Program, product: Variable, struct: str, place: Callable[[Variable], str]
) -> list[str]:
    """The lines that define ``epilogue``, which computes `body` on a block of `product`.

    Its function takes the addresses of operands in an array, so that layers of the same shape share it.
    """
    shape = product.type.shape
    width = shape[-1]
    values: dict[Variable, str] = {product: "block[j]"}
    before, at_row = ["char *const *operands = context;"], []
    operands: list[str] = []
    whole = []
    for i, v in enumerate(body.inputs):
        if v is product:
            continue
        found = access(v.type.shape, shape, ("(row + i)", len(shape) - 1), ("column", 1))
        constant = pointer(v, const=True)
        before.append(f"{constant}x{i} = ({constant})operands[{len(operands)}];")
        operands.append(place(v))
        if found.step:
            at_row.append(f"{constant}p{i} = x{i} + {found.place};")
            values[v] = f"p{i}[j]"
        else:
            line, values[v] = read(v, f"a{i}", f"x{i}", found.place)
            (before if found.place == "0" else at_row).append(line)
        if v.type == product.type:
            whole.append(place(v))
    results = []
    for i, v in enumerate(body.outputs):
        at_row.append(f"{pointer(v)}q{i} = ({pointer(v)})operands[{len(operands)}] + (row + i) * {width} + column;")
        operands.append(place(v))
        if v.type == product.type:
            whole.append(place(v))
        results.append(f"q{i}[j]")
    t = c_type(product.type.dtype)
    parameters = (
        f"void *context, const {t} *block, int64_t ld, int64_t row, int64_t column, int64_t rows, int64_t columns"
    )
    lines = [
        *before,
        "for (int64_t i = 0; i < rows; i++, block += ld) {",
        *(f"    {line}" for line in at_row),
        "    #pragma omp simd",
        "    for (int64_t j = 0; j < columns; j++) {",
        *(f"        {line}" for line in statements(body, values, results)),
        "    }",
        "}",
    ]
    name = writer.function("epilogue", parameters, lines)
    ahead = list(dict.fromkeys(whole))[:MAX_AHEAD]
    return [
        f"char *const operands[] = {{{', '.join(f'(char *){operand}' for operand in operands)}}};",
        f"const {struct} epilogue = {{{name}, (void *)operands, {{{', '.join(ahead) or 'NULL'}}}, {len(ahead)}}};",
    ]


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
