"""Equations of rows: a team of threads holds a row in registers and reads and writes it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from adtrain.backends.cuda.codegen.block_steps import Step, lanes_for
from adtrain.backends.cuda.codegen.index_rules import BY_INDEX
from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Part, indented
from adtrain.codegen.access import access, read
from adtrain.codegen.elementwise import statements, strides
from adtrain.codegen.expressions import c_type, literal
from adtrain.core.fused import body_of
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import Shape
from adtrain.lowering.cuda.reduce import WARP, vector_width
from adtrain.lowering.cuda.rows import MAX_WARP_ROW, lanes_of_row
from adtrain.passes.fuse_elementwise import by_element

MIN_IN_REGISTERS = 64
"""Minimum elements of a row that threads hold in registers."""
THREADS = 256
MANY_THREADS = 1 << 15
"""Threads that keep the largest GPU busy. With fewer, a whole block shares a row."""

MAX_ITEMS = 32
"""Maximum elements of a row for a thread of a block that computes other equations too."""

ROW, VALUE, COLUMN, NUMBER, TABLE = "row", "value", "column", "number", "table"
"""What a thread holds of a variable: its elements of the row; the row's one value; its columns of a vector that all
rows share; a number; a pointer to a table, from which each row reads one element."""


def register_rows(body: Program) -> Part | None:
    """The part for a `row_fused` body of rows of one length; None if an equation has no rule here."""
    long = [v for v in (*body.inputs, *body.outputs) if _is_long(v.type.shape)]
    if not long:
        return None
    *leading, length = max(long, key=lambda v: v.size).type.shape
    return _Writer(body, prod(leading), length).part()


def rows_in_block(body: Program, names: Mapping[Variable, str], threads: int) -> Step | None:
    """How one thread block computes a body of rows of one length; None if an equation has no rule here.

    Args:
        names: the pointers to the inputs and outputs.
    """
    found = next((v for e in body.equations for v in (*e.inputs, *e.outputs) if len(v.type.shape) == 2), None)
    return None if found is None else _Writer(body, *found.type.shape).step(names, threads)


def _is_long(shape: Shape) -> bool:
    return len(shape) > 1 and shape[-1] >= MIN_IN_REGISTERS


class _Writer:
    """Writes the statements of the threads of a row."""

    def __init__(self, body: Program, count: int, length: int) -> None:
        self.body, self.count, self.length = body, count, length
        self.kinds: dict[Variable, str] = {}
        self.names: dict[Variable, str] = {}
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
        items = -(-(self.length // width) // team)
        if items * width > MAX_ITEMS or not self._written():
            return None
        lines = [
            f"using Row = RegisterRow<{self.length}, {team}, {items}, {width}>;",
            f"in_block::for_each_row<THREADS, {self.count}, {team}>(t, [&](int row, int, bool live) {{",
            *indented([*self.lines, *map(self._store, self.body.outputs)]),
            "});",
        ]
        return Step(lines, min(self.count * team, threads))

    def _rows(self) -> list[Variable]:
        """The inputs and outputs that have all rows."""
        return [v for v in (*self.body.inputs, *self.body.outputs) if self._kind(v) == ROW]

    def _written(self) -> bool:
        """Write the equations; False if one has no rule."""
        return all(map(self._load, self.body.inputs)) and all(map(self._write, self.body.equations))

    def part(self) -> Part | None:
        """See `register_rows`."""
        itemsize = max(v.type.dtype.itemsize for v in self._rows())
        width = vector_width(self.length, itemsize)
        team = self._team(self.length // width, self.length * itemsize)
        items = -(-(self.length // width) // team)
        if not self._written():
            return None
        blocks = -(-self.count * team // THREADS)
        mine = f"(int64_t)block * {THREADS // team} + threadIdx.x / {team}"
        lines = [
            f"using Row = RegisterRow<{self.length}, {team}, {items}, {width}>;",
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
        lanes = lanes_of_row(vectors, size)
        return lanes if size <= MAX_WARP_ROW and (vectors <= WARP or self.count * lanes >= MANY_THREADS) else THREADS

    def _kind(self, v: Variable) -> str | None:
        """What a thread holds of a variable of an equation whose results have one item for each row."""
        shape = v.type.shape
        if shape[-1:] == (self.length,) and v.size == self.count * self.length:
            return ROW
        return VALUE if shape in ((self.count,), (self.count, 1)) else None

    def _load(self, v: Variable) -> bool:
        name, own = self.pointers[v], f"a{len(self.names)}"
        readers = [e for e in self.body.equations if v in e.inputs]
        kinds = {self._kind_for(v, e) for e in readers}
        if len(kinds) != 1 or (kind := kinds.pop()) is None:
            return False
        c, at = c_type(v.type.dtype), _place(v, readers[0])
        self.kinds[v], self.names[v] = kind, name if kind == TABLE else own
        if kind in (ROW, COLUMN):
            at = f"{name} + {at}" if kind == ROW else name
            self.lines += [f"{c} {own}[Row::COUNT];", f"Row::load({at}, {own});"]
        elif kind != TABLE:
            self.lines.append(read(v, own, name, at if kind == VALUE else "0")[0])
        return True

    def _kind_for(self, v: Variable, e: Equation) -> str | None:
        """What a thread holds of an argument of an equation."""
        if e.has(Trait.GATHER) and v is e.inputs[0]:
            return TABLE
        if not by_element(e):
            return self._kind(v)
        shape = e.outputs[0].type.shape
        rows = _leading(shape)
        steps = strides(v.type.shape, shape)
        by_row, by_column = any(steps[:rows]), any(steps[rows:])
        if by_row:
            return ROW if by_column else VALUE
        return COLUMN if by_column else NUMBER

    def _write(self, e: Equation) -> bool:
        """Write an equation; False if it has no rule."""
        if e.has(Trait.RESHAPE):
            (x,), (y,) = e.inputs, e.outputs
            self.kinds[y], self.names[y] = self.kinds[x], self.names[x]
            return self._kind(y) == self.kinds[x]
        has_rule = by_element(e) or (e.primitive.name in RULES and _has_rule(e))
        if not has_rule or any(self.kinds[v] != self._kind_for(v, e) for v in e.inputs):
            return False
        for y in e.outputs:
            kind = self._kind(y)
            if kind is None:
                return False
            self.kinds[y], self.names[y] = kind, f"v{len(self.names)}"
            self.lines.append(f"{c_type(y.type.dtype)} {self.names[y]}{'[Row::COUNT]' if kind == ROW else ''};")
        names = [self.names[v] for v in (*e.inputs, *e.outputs)]
        self.lines += self._elementwise(e) if by_element(e) else RULES[e.primitive.name](e, names)
        return True

    def _elementwise(self, e: Equation) -> list[str]:
        body = flat(body_of(e))
        element = {ROW: "{}[i]", COLUMN: "{}[i]", VALUE: "{}", NUMBER: "{}"}
        values = {v: element[self.kinds[v]].format(self.names[v]) for v in body.inputs}
        results = [element[self.kinds[v]].format(self.names[v]) for v in body.outputs]
        lines = statements(body, values, results)
        if self.kinds[e.outputs[0]] == VALUE:
            return ["{", *indented(lines), "}"]
        return _for_each_element(lines)

    def _store(self, v: Variable) -> str:
        if self.kinds[v] == ROW:
            return f"if (live) Row::store({self.names[v]}, {self.pointers[v]} + row * {self.length});"
        return f"if (live && Row::thread() == 0) {self.pointers[v]}[row] = {self.names[v]};"


def _leading(shape: Shape) -> int:
    """The number of axes of `shape` along which rows lie."""
    return max(1, len(shape) - 1)


def _place(v: Variable, e: Equation) -> str:
    """The offset in an argument of what an equation reads for `row`.

    Several rows of sequences (B, S, F) read the same row of an argument (S, F) or (B, 1, F).
    """
    shape = e.outputs[0].type.shape if by_element(e) else v.type.shape
    return access(v.type.shape, shape, ("row", _leading(shape))).place


def _has_rule(e: Equation) -> bool:
    """Whether an equation along rows reduces, normalises or indexes whole rows, by one index each."""
    x = e.inputs[0].type
    if e.primitive.name in ("take_along_axis", "scatter_along_axis"):
        return e.inputs[1].type.shape == (x.shape[0], 1)
    if e.has(Trait.GATHER):
        return takes_numbers(e)
    if e.primitive.name == "one_hot":
        return len(x.shape) == 1
    axes = e.params["axes"] if "axes" in e.params else (e.params["axis"],)
    return len(x.shape) == 2 and tuple(axes) == (1,)


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
