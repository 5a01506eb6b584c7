"""Equations of rows: a team of threads holds a row in registers and reads and writes it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from adtrain.backends.cuda.codegen.block_rules import BY_INDEX
from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Part, Step, indented, lanes_for
from adtrain.codegen.elementwise import Axis, access, c_type, literal, merged, read, statements, strides
from adtrain.core.axes import row_axes
from adtrain.core.kernel import WARP
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of
from adtrain.core.types import Shape
from adtrain.lowering.cuda.reduce import VECTOR, power_of_two, vector_width
from adtrain.passes.fusion import by_element

MIN_IN_REGISTERS = 64
"""Minimum elements of a row that threads hold in registers."""
THREADS = 256
MANY_THREADS = 1 << 15
"""Threads that fill the largest GPU. With fewer, a whole block shares a long row."""

MAX_WARP_ROW, MIN_TEAM, THREAD_BYTES = 4096, 8, 64
"""Maximum bytes of a row for the lanes of a warp; minimum of lanes that share a row, if it has that many vectors; bytes
of a row for each lane."""
MAX_ELEMENTS = 32
"""Maximum elements of a row that a thread of `rows_in_block` holds."""

ALONG_ROWS = frozenset(("sum", "max", "min", "argmax", "softmax", "log_softmax", "standardize"))
"""Primitives that reduce or normalise whole rows."""

ROW, VALUE, COLUMN, NUMBER, TABLE = "row", "value", "column", "number", "table"
"""What a thread holds of a variable: its elements of the row; the row's one value; its columns of a vector that all
rows share; a number that all rows share; a pointer to a table, from which each row reads one element."""


class Held(NamedTuple):
    """What a thread holds of a variable, and at which offset it is in memory."""

    of: Variable
    kind: str
    place: str


@dataclass(frozen=True)
class Rows:
    """Rows of arrays. The first axes of an array are the rows. The other axes are the elements of a row.

    Example: the rows of a sum over the last two axes of (A, B, M, N) are A x B images of M x N elements.

    Attributes:
        count: the number of rows.
        length: the elements of a row.
    """

    count: int
    length: int

    def held(self, shape: Shape) -> str | None:
        """What a thread holds of a variable that has a row or one number for each row; None if it has neither."""
        axes = row_axes(shape, self.count)
        if axes is None:
            return None
        if prod(shape[axes:]) == self.length and axes < len(shape):
            return ROW
        return VALUE if prod(shape[axes:]) == 1 else None

    def held_for(self, v: Variable, e: Equation) -> str | None:
        """What a thread holds of an argument of an equation; None if the equation cannot read it."""
        if e.has(Trait.GATHER) and v is e.inputs[0]:
            return TABLE
        if not by_element(e):
            return self.held(v.type.shape)
        shape = e.outputs[0].type.shape
        axes = row_axes(shape, self.count)
        if axes is None:
            return None
        steps = strides(v.type.shape, shape)
        if not any(steps[axes:]):
            return VALUE if any(steps[:axes]) else NUMBER
        if merged(shape[axes:], [steps[axes:]]) != [Axis(self.length, (1,))]:
            return None  # its elements repeat within a row
        return ROW if any(steps[:axes]) else COLUMN

    def place(self, v: Variable, e: Equation) -> str:
        """The offset in an argument of what an equation reads for `row`.

        Several rows of sequences (B, S, F) read the same row of an argument (S, F) or (B, 1, F).
        """
        shape = e.outputs[0].type.shape if by_element(e) else v.type.shape
        return access(v.type.shape, shape, ("row", row_axes(shape, self.count) or 0)).place

    def read(self, v: Variable, e: Equation) -> Held:
        """An argument of an equation."""
        kind = self.held_for(v, e) or ""
        return Held(v, kind, self.place(v, e) if kind in (ROW, VALUE) else "0")

    def made(self, v: Variable) -> Held:
        """A result of an equation."""
        kind = self.held(v.type.shape) or ""
        return Held(v, kind, f"row * {self.length}" if kind == ROW else "row")

    def computes(self, e: Equation) -> bool:
        """Whether threads that hold rows in registers compute an equation."""
        arguments = [self.held_for(v, e) for v in e.inputs]
        results = [self.held(v.type.shape) for v in e.outputs]
        if None in arguments or None in results:
            return False
        if e.has(Trait.RESHAPE):
            return arguments == results
        return by_element(e) or (e.primitive.name in RULES and self._is_along_rows(e))

    def _is_along_rows(self, e: Equation) -> bool:
        """Whether an equation reduces or normalises whole rows, or indexes each by one number."""
        x = e.inputs[0].type
        if e.primitive.name in ("take_along_axis", "scatter_along_axis"):
            return e.inputs[1].type.shape == (x.shape[0], 1)
        if e.has(Trait.GATHER):
            return takes_numbers(e)
        if e.primitive.name == "one_hot":
            return len(x.shape) == 1
        return e.rows_along == self.count


def rows_of(e: Equation) -> Rows | None:
    """The rows of an equation that works along the last axes of its argument; None for other equations."""
    count = e.rows_along if e.primitive.name in ALONG_ROWS else None
    return Rows(count, e.inputs[0].size // count) if count else None


def register_rows(body: Program, shortest: int = MIN_IN_REGISTERS) -> Part | None:
    """The part for a `row_fused` body of rows of one length; None if an equation has no rule here.

    Args:
        shortest: minimum elements of a row.
    """
    rows = rows_in(body)
    return None if rows is None or rows.length < shortest else _Writer(body, rows).part()


def rows_in_block(body: Program, names: Mapping[Variable, str], threads: int) -> Step | None:
    """How one thread block computes a body of rows of one length; None if an equation has no rule here.

    Args:
        names: the pointers to the inputs and outputs.
    """
    found = next((v for e in body.equations for v in (*e.inputs, *e.outputs) if len(v.type.shape) == 2), None)
    return None if found is None else _Writer(body, Rows(*found.type.shape)).step(names, threads)


def rows_in(body: Program) -> Rows | None:
    """The rows of the equations along rows; without such equations the rows of the largest input or output.

    None if no value has rows.
    """
    found = [rows for e in body.equations if (rows := rows_of(e))]
    if not found:
        shapes = (v.type.shape for v in (*body.inputs, *body.outputs))
        found = [Rows(prod(shape[:-1]), shape[-1]) for shape in shapes if len(shape) > 1]
    return max(found, key=lambda rows: rows.count * rows.length, default=None)


class _Writer:
    """Writes the statements of the threads of a row."""

    def __init__(self, body: Program, rows: Rows) -> None:
        self.body, self.rows, self.count, self.length = body, rows, rows.count, rows.length
        self.names: dict[Held, str] = {}
        self.lines: list[str] = []
        self.pointers: Mapping[Variable, str] = {v: f"x{i}" for i, v in enumerate(body.inputs)} | {
            v: f"y{i}" for i, v in enumerate(body.outputs)
        }

    def step(self, names: Mapping[Variable, str], threads: int) -> Step | None:
        """See `rows_in_block`."""
        self.pointers = names
        itemsize = max((v.type.dtype.itemsize for v in self._rows()), default=1)
        width = vector_width(self.length, itemsize)
        team = lanes_for(self.length // width, self.count, threads)
        vectors = -(-(self.length // width) // team)
        if vectors * width > MAX_ELEMENTS or not self._written():
            return None
        lines = [
            f"using Row = RegisterRow<{self.length}, {team}, {vectors}, {width}>;",
            f"in_block::for_each_row<THREADS, {self.count}, {team}>(t, [&](int row, int, bool live) {{",
            *indented([*self.lines, *map(self._store, self.body.outputs)]),
            "});",
        ]
        return Step(lines, min(self.count * team, threads))

    def _rows(self) -> list[Variable]:
        """The inputs and outputs that have all rows."""
        return [v for v in (*self.body.inputs, *self.body.outputs) if self.rows.held(v.type.shape) == ROW]

    def _written(self) -> bool:
        """Write the equations; False if one has no rule."""
        if not all(map(self.rows.computes, self.body.equations)):
            return False
        for v in self.body.inputs:
            self._load(v)
        return all(map(self._write, self.body.equations))

    def part(self) -> Part | None:
        """See `register_rows`."""
        itemsize = max((v.type.dtype.itemsize for v in self._rows()), default=VECTOR)
        width = vector_width(self.length, itemsize)
        team = self._team(self.length // width, self.length * itemsize)
        vectors = -(-(self.length // width) // team)
        if not self._written():
            return None
        blocks = -(-self.count * team // THREADS)
        mine = f"(int64_t)block * {THREADS // team} + threadIdx.x / {team}"
        lines = [
            f"using Row = RegisterRow<{self.length}, {team}, {vectors}, {width}>;",
            f"const bool live = {mine} < {self.count};",
            f"const int64_t row = live ? {mine} : {self.count - 1};",
            *self.lines,
            *map(self._store, self.body.outputs),
        ]
        checked = any(e.primitive.name in BY_INDEX for e in self.body.equations)
        headers = ("common/block_ops.cuh", "reduce/register_rows.cuh")
        return Part(lines, self.body.inputs, self.body.outputs, headers, blocks=blocks, checked=checked)

    def _team(self, vectors: int, size: int) -> int:
        """Threads that share a row of `size` bytes: lanes of a warp, or all threads of a block."""
        lanes = min(power_of_two(vectors), max(MIN_TEAM, min(power_of_two(-(-size // THREAD_BYTES)), WARP)))
        return lanes if size <= MAX_WARP_ROW and (vectors <= WARP or self.count * lanes >= MANY_THREADS) else THREADS

    def _load(self, v: Variable) -> None:
        """Load an input once for each way in which equations read it."""
        for read_as in dict.fromkeys(self.rows.read(v, e) for e in self.body.equations if v in e.inputs):
            pointer, name = self.pointers[v], f"a{len(self.names)}"
            self.names[read_as] = pointer if read_as.kind == TABLE else name
            if read_as.kind in (ROW, COLUMN):
                place = f"{pointer} + {read_as.place}" if read_as.kind == ROW else pointer
                self.lines += [f"{c_type(v.type.dtype)} {name}[Row::COUNT];", f"Row::load({place}, {name});"]
            elif read_as.kind != TABLE:
                self.lines.append(read(v, name, pointer, read_as.place)[0])

    def _write(self, e: Equation) -> bool:
        """Write an equation; False if it reads a result in another way than threads hold it."""
        given, made = [self.rows.read(v, e) for v in e.inputs], [self.rows.made(v) for v in e.outputs]
        if any(x not in self.names for x in given):
            return False
        if e.has(Trait.RESHAPE):
            self.names[made[0]] = self.names[given[0]]
            return True
        for y in made:
            self.names[y] = f"v{len(self.names)}"
            self.lines.append(f"{c_type(y.of.type.dtype)} {self.names[y]}{'[Row::COUNT]' if y.kind == ROW else ''};")
        names = [self.names[x] for x in (*given, *made)]
        self.lines += self._elementwise(e, [*given, *made]) if by_element(e) else RULES[e.primitive.name](e, names)
        return True

    def _elementwise(self, e: Equation, held: Sequence[Held]) -> list[str]:
        body = flat(body_of(e))
        texts = {x.of: self.names[x] + ("[i]" if x.kind in (ROW, COLUMN) else "") for x in held}
        lines = statements(body, {v: texts[v] for v in body.inputs}, [texts[v] for v in body.outputs])
        if held[-1].kind == VALUE:
            return ["{", *indented(lines), "}"]
        return _for_each_element(lines)

    def _store(self, v: Variable) -> str:
        made = self.rows.made(v)
        if made.kind == ROW:
            return f"if (live) Row::store({self.names[made]}, {self.pointers[v]} + row * {self.length});"
        return f"if (live && Row::thread() == 0) {self.pointers[v]}[row] = {self.names[made]};"


def takes_numbers(e: Equation) -> bool:
    """Whether it gathers single elements of a vector."""
    return e.primitive.name == "take" and len(e.inputs[0].type.shape) == len(e.inputs[1].type.shape) == 1


def _for_each_element(lines: Sequence[str]) -> list[str]:
    return ["#pragma unroll", "for (int i = 0; i < Row::COUNT; i++) {", *indented(lines), "}"]


RowRule = Callable[[Equation, Sequence[str]], "list[str]"]
"""``rule(equation, names of its inputs and outputs)`` returns statements."""


def _reduction(op: str) -> RowRule:
    return lambda e, names: [f"{names[1]} = Row::reduce<{op}, {c_type(e.outputs[0].type.dtype)}>({names[0]});"]


def _softmax(logarithm: str) -> RowRule:
    return lambda e, names: [f"Row::softmax<{logarithm}>({names[0]}, {names[1]});"]


def _standardize(e: Equation, names: Sequence[str]) -> list[str]:
    eps = f"({c_type(e.inputs[0].type.dtype)}){literal(e.params['eps'])}"
    return [f"Row::standardize({', '.join(names)}, {eps});"]


def _take_along_axis(e: Equation, names: Sequence[str]) -> list[str]:
    x, index, y = names
    valid = f"in_block::valid({index}, {e.inputs[0].type.shape[1]}, bad)"
    return [f"{y} = Row::at({x}, {valid} ? (int64_t){index} : -1);"]


def _take(e: Equation, names: Sequence[str]) -> list[str]:
    x, index, y = names
    valid = f"in_block::valid({index}, {e.inputs[0].type.shape[0]}, bad)"
    return [f"{y} = {valid} ? {x}[{index}] : ({c_type(e.outputs[0].type.dtype)})0;"]


def _scatter_along_axis(e: Equation, names: Sequence[str]) -> list[str]:
    ct, index, y = names
    zero = f"({c_type(e.outputs[0].type.dtype)})0"
    checked = f"in_block::valid({index}, {e.params['length']}, bad);"
    return [checked, *_for_each_element([f"{y}[i] = Row::column(i) == {index} ? {ct} : {zero};"])]


def _one_hot(e: Equation, names: Sequence[str]) -> list[str]:
    index, y = names
    checked = f"in_block::valid({index}, {e.params['num_classes']}, bad);"
    return [checked, *_for_each_element([f"{y}[i] = Row::column(i) == {index};"])]


RULES: Mapping[str, RowRule] = {
    "sum": _reduction("Sum"),
    "max": _reduction("Max"),
    "min": _reduction("Min"),
    "argmax": lambda e, names: [f"{names[1]} = Row::argmax({names[0]});"],
    "softmax": _softmax("false"),
    "log_softmax": _softmax("true"),
    "standardize": _standardize,
    "take": _take,
    "take_along_axis": _take_along_axis,
    "scatter_along_axis": _scatter_along_axis,
    "one_hot": _one_hot,
}
"""By primitive name. Elementwise equations have one rule; a reshape needs none."""
