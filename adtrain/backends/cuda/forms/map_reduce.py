"""Map-reduce on the GPU: a thread keeps ROWS rows in registers, and a block reads the columns through shared memory.

If there are few rows, blocks divide the columns too. A second launch joins their accumulators in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from adtrain.backends.cuda.codegen.part import Kernel, Part, indented, kernel, part_names
from adtrain.backends.cuda.forms import Form, define
from adtrain.codegen.elementwise import c_type
from adtrain.codegen.map_reduce import STARTS, MapReduce, join, map_reduce, value
from adtrain.core.kernel import Target
from adtrain.core.program import MAP_REDUCE, Equation, Variable, body_of

THREADS = 128
ROWS = 2
"""Rows of a thread. It reads a column from shared memory once for all of them."""
TILE = 128
"""Most columns of a tile. Sums of a tile are added in the type of the elements, sums of tiles in float64."""
TILE_BYTES = 32 * 1024
FEW_STATES, RESIDENT, RESIDENT_MANY = 6, 6, 4
"""Blocks that a multiprocessor must have registers for, with at most FEW_STATES numbers of accumulators, and with more.
"""


class State(NamedTuple):
    """A number of an accumulator: its accumulator, its name after "part" and "total", its type and its start."""

    accumulator: int
    name: str
    type: str
    start: str


def map_reduce_kernels(equation: Equation, target: Target) -> list[Kernel]:
    """The launches of a `map_reduce` equation."""
    body = body_of(equation)
    loop = map_reduce(body)
    groups = -(-loop.rows // (THREADS * ROWS))
    bytes_each = sum(-(-loop.scalars.nodes[number].dtype.itemsize // 4) * 4 for number, _ in loop.column_nodes())
    tile = min(TILE, TILE_BYTES // max(bytes_each, 1))
    tiles = -(-loop.columns // tile)
    states = [
        State(k, f"{k}_{s}", c_type(a.dtype), start)
        for k, a in enumerate(loop.accumulators)
        for s, start in enumerate(STARTS[a.kind])
    ]
    blocks = RESIDENT if len(states) <= FEW_STATES else RESIDENT_MANY
    slices = max(1, min(target.multiprocessors * blocks // groups, tiles))
    length = -(-tiles // slices)
    slices = -(-tiles // length)
    names = part_names(body.inputs, body.outputs)
    writer = _Writer(loop, states, names, slices, length * tile, tile)
    scratch = 8 * len(states) * slices * loop.rows if slices > 1 else 0
    first = Part(
        list(writer.reduce()),
        body.inputs,
        body.outputs,
        definitions="\n".join(writer.column()),
        blocks=groups * slices,
        scratch=scratch,
    )
    parts = [first]
    if slices > 1:
        parts.append(replace(first, lines=list(writer.join()), definitions="", blocks=-(-loop.rows // THREADS)))
    return [kernel("map_reduce", [part], THREADS, resident=blocks) for part in parts]


@dataclass(frozen=True)
class _Writer:
    loop: MapReduce
    states: Sequence[State]
    names: dict[Variable, str]
    slices: int
    length: int
    tile: int

    def column(self) -> Iterator[str]:
        """The type of a column in shared memory."""
        yield "struct __align__(16) Column {"
        yield from (f"    {c} t{number};" for number, c in self.loop.column_nodes())
        yield "};"

    def reduce(self) -> Iterator[str]:
        """Statements of a block for its rows and its slice of the columns."""
        loop, states = self.loop, self.states
        yield f"__shared__ Column tile[{self.tile}];"
        yield from self._numbers()
        yield f"const int slice = block % {self.slices};"
        yield f"const int64_t row = (int64_t)(block / {self.slices}) * {THREADS * ROWS} + threadIdx.x;"
        yield from (f"{c} row{number}[{ROWS}];" for number, c, *_ in loop.loads("i"))
        yield from (f"double total{s.name}[{ROWS}];" for s in states)
        yield from _each_row(
            f"const int64_t i = min(row + r * THREADS, {loop.rows - 1}ll);",
            *(f"row{k}[r] = {self.names[v]}[i * {step} + {first}];" for k, _, v, step, first in loop.loads("i")),
            *(f"total{s.name}[r] = {s.start};" for s in states),
        )
        yield f"const int64_t begin = slice * {self.length}ll, end = min(begin + {self.length}, {loop.columns}ll);"
        yield f"for (int64_t start = begin; start < end; start += {self.tile}) {{"
        yield from indented(list(self._tile()))
        yield "}"
        stores = list(self._results("[r]"))
        if self.slices > 1:
            stores = [f"double *const to = (double *)own + (int64_t)slice * {len(states) * loop.rows} + i;"]
            stores += [f"to[{k * loop.rows}ll] = total{s.name}[r];" for k, s in enumerate(states)]
        yield from _each_row("const int64_t i = row + r * THREADS;", f"if (i >= {loop.rows}) continue;", *stores)

    def join(self) -> Iterator[str]:
        """Statements of a block of the second launch: a thread joins the accumulators of one row."""
        rows = self.loop.rows
        yield from self._numbers()
        yield "const int64_t i = (int64_t)block * THREADS + threadIdx.x;"
        yield f"if (i >= {rows}) return;"
        yield from (f"double total{s.name} = {s.start};" for s in self.states)
        yield f"for (int slice = 0; slice < {self.slices}; slice++) {{"
        yield f"    const double *const from = (const double *)own + (int64_t)slice * {len(self.states) * rows} + i;"
        yield from (f"    const double part{s.name} = from[{k * rows}ll];" for k, s in enumerate(self.states))
        yield from indented(list(self._joined("")))
        yield "}"
        yield from self._results("")

    def _numbers(self) -> Iterator[str]:
        """The nodes that are the same for all pairs."""
        for number, c, v, _, first in self.loop.loads(""):
            yield f"const {c} t{number} = {self.names[v]}[{first}];"
        yield from (f"const {c} t{number} = {text};" for number, c, text in self.loop.nodes(""))

    def _of(self, accumulator: int) -> list[State]:
        return [s for s in self.states if s.accumulator == accumulator]

    def _tile(self) -> Iterator[str]:
        """Statements that join a tile's columns to the totals."""
        loop, states = self.loop, self.states
        yield f"const int columns = min((int64_t){self.tile}, end - start);"
        yield "__syncthreads();"
        yield "for (int c = threadIdx.x; c < columns; c += THREADS) {"
        for number, c, v, step, first in loop.loads("j"):
            yield f"    const {c} t{number} = {self.names[v]}[(start + c) * {step} + {first}];"
        yield from (f"    const {c} t{number} = {text};" for number, c, text in loop.nodes("j"))
        yield from (f"    tile[c].t{number} = t{number};" for number, _ in loop.column_nodes())
        yield "}"
        yield "__syncthreads();"
        yield from (f"{s.type} part{s.name}[{ROWS}];" for s in states)
        yield from _each_row(*(f"part{s.name}[r] = {s.start};" for s in states))
        yield "#pragma unroll 4"
        yield "for (int c = 0; c < columns; c++) {"
        yield "    const Column column = tile[c];"
        yield from (f"    const {c} t{number} = column.t{number};" for number, c in loop.column_nodes())
        yield from indented(_each_row(*self._terms()))
        yield "}"
        yield from _each_row(*self._joined("[r]"))

    def _terms(self) -> Iterator[str]:
        """Statements that join a column to the parts of row r."""
        loop = self.loop
        yield from (f"const {c} t{number} = row{number}[r];" for number, c, *_ in loop.loads("i"))
        for over in ("i", "ij"):
            yield from (f"const {c} t{number} = {text};" for number, c, text in loop.nodes(over))
        for k, a in enumerate(loop.accumulators):
            yield from loop.folded(a, [f"part{s.name}[r]" for s in self._of(k)])

    def _joined(self, index: str) -> Iterator[str]:
        """Statements that join parts to totals."""
        for k, a in enumerate(self.loop.accumulators):
            totals, parts = ([f"{kind}{s.name}{index}" for s in self._of(k)] for kind in ("total", "part"))
            yield from join(a.kind, "double", totals, parts)

    def _results(self, index: str) -> Iterator[str]:
        for result in self.loop.results:
            a = self.loop.accumulators[result.accumulator]
            total = value(a.kind, [f"total{s.name}{index}" for s in self._of(result.accumulator)])
            yield f"{self.names[result.output]}[i * {result.step} + {result.first}] = {result.value(total)};"


def _each_row(*lines: str) -> list[str]:
    """Statements for each row r of a thread."""
    return ["#pragma unroll", f"for (int r = 0; r < {ROWS}; r++) {{", *indented(lines), "}"]


define(Form(MAP_REDUCE, map_reduce_kernels))
