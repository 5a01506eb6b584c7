"""Equations of long rows: a thread block goes through a row several times, and reads it from device memory once if
it fits into shared memory.

A block takes its row through the equations in rounds. A round goes through all columns; a thread loads 16 bytes at a
time. A round computes the sums, maxima and minima that later rounds need, and stores results. The elements of
intermediate rows are computed in each round that needs them, so they are never stored. Shared memory keeps the
arguments that several rounds read, as far as they fit.

log_softmax with its gradient takes three rounds: the maximum; the sum of exponentials; the gradient.

If all rows are bfloat16 in memory, exponentials are approximate (`exp_approximate`): they take 3 instructions, not 9.
Otherwise a kernel for many classes computes for longer than memory takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from adtrain.backends.cuda.codegen.block_rules import BY_INDEX
from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Part, indented, resident_blocks
from adtrain.backends.cuda.codegen.register_rows import COLUMN, ROW, TABLE, Held, Rows, rows_in
from adtrain.codegen.elementwise import c_type, literal, statements
from adtrain.core.kernel import WARP, Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of
from adtrain.core.types import BITS
from adtrain.lowering.cuda.reduce import VECTOR, power_of_two, vector_width
from adtrain.passes.fusion import by_element

MIN_THREADS, MAX_THREADS = 4 * WARP, 1024
"""Minimum threads of a block; maximum threads of all blocks of a multiprocessor, so that each has 64 registers."""
LOADS = 4
"""Vectors of 16 bytes that a thread loads before it uses the first one."""
PARTS = 4
"""Partial results of a reduction in each thread, so that fewer elements are added one after another."""
OWN_SHARED = 4 << 10
"""Bytes of shared memory that are left for the reductions over the block."""


class Element(NamedTuple):
    """An element of a row: how a thread computes it at `column`.

    Attributes:
        kind: the C type.
        level: the number of rounds before the first one that can compute it.
        lines: statements that define it; none for an argument.
        needs: the names of the elements that these read.
        memory: for an argument, C text of the pointer to its row.
        own: for an argument of rows, bytes of an element; 0 for others, such as columns that all rows share.
    """

    kind: str
    level: int
    lines: Sequence[str] = ()
    needs: Sequence[str] = ()
    memory: str = ""
    own: int = 0


class Reduction(NamedTuple):
    """A reduction of the elements `of` by an operation of `common/collectives.cuh`, in the round `level`.

    Attributes:
        where: the name of a bool element: whether a column takes part, which few columns do. "": all columns take part.
    """

    level: int
    op: str
    kind: str
    of: str
    where: str = ""


class LongRows:
    """The statements of a block for a row of a body.

    Args:
        rounded: whether all rows are bfloat16 in memory.

    Attributes:
        elements, reductions: by name.
        numbers: for each number of the row, the rounds before it, and the statements that define it.
        levels: by name, the number of rounds before the value is known.
        sums: for elements whose sum needs no round, the number that is their sum.
        read_at: arguments of which a number of the row reads a single element, and the rounds before this number.
        exp: the C function of exponentials.
        names: the names of what a thread holds of the variables.
    """

    def __init__(self, body: Program, rows: Rows, rounded: bool) -> None:
        self.body, self.rows, self.exp = body, rows, "exp_approximate" if rounded else "exp"
        self.elements: dict[str, Element] = {}
        self.reductions: dict[str, Reduction] = {}
        self.numbers: list[tuple[int, Sequence[str]]] = []
        self.levels: dict[str, int] = {}
        self.sums: dict[str, str] = {}
        self.read_at: list[tuple[str, int]] = []
        self.names: dict[Held, str] = {}
        for i, v in enumerate(body.inputs):
            for held in dict.fromkeys(rows.read(v, e) for e in body.equations if v in e.inputs):
                self.names[held] = self._argument(held, f"x{i}")
        for e in body.equations:
            self._write(e)

    def _argument(self, held: Held, pointer: str) -> str:
        kind = c_type(held.of.type.dtype)
        if held.kind == TABLE:
            return pointer
        if held.kind in (ROW, COLUMN):
            own = held.of.type.dtype.itemsize if held.kind == ROW else 0
            return self.argument(kind, f"{pointer} + {held.place}", own)
        return self.number(kind, [f"{RESULT} = {pointer}[{held.place}];"], ())

    def _write(self, e: Equation) -> None:
        given, made = [self.names[self.rows.read(v, e)] for v in e.inputs], [self.rows.made(v) for v in e.outputs]
        if e.has(Trait.RESHAPE):
            results = given[:1]
        elif by_element(e):
            results = self._elementwise(e, given)
        else:
            results = RULES[e.primitive.name](self, e, given)
        self.names |= dict(zip(made, results, strict=True))

    def _elementwise(self, e: Equation, given: Sequence[str]) -> list[str]:
        body = flat(body_of(e))
        define = self.element if self.rows.made(e.outputs[0]).kind == ROW else self.number
        found = []
        for v in body.outputs:
            own = Program(body.inputs, {}, body.equations, (v,))
            lines = statements(own, dict(zip(body.inputs, given, strict=False)), [RESULT], {"exp": f"{self.exp}(a)"})
            found.append(define(c_type(v.type.dtype), ["{", *indented(lines), "}"], given))
        return found

    def element(self, kind: str, lines: Sequence[str], given: Iterable[str]) -> str:
        """Define an element by statements that read the names `given`."""
        name, given = f"e{len(self.levels)}", list(given)
        level = max((self.levels[x] for x in given), default=0)
        self.levels[name] = level
        text = [line.replace(RESULT, name) for line in lines]
        self.elements[name] = Element(kind, level, text, [x for x in given if x in self.elements])
        return name

    def argument(self, kind: str, memory: str, own: int) -> str:
        """An argument of rows, or of columns that all rows share."""
        name = f"e{len(self.levels)}"
        self.levels[name] = 0
        self.elements[name] = Element(kind, 0, memory=memory, own=own)
        return name

    def number(self, kind: str, lines: Sequence[str], given: Iterable[str]) -> str:
        """Define a number of the row by statements that read the numbers `given`."""
        name = f"n{len(self.levels)}"
        level = self.levels[name] = max((self.levels[x] for x in given), default=0)
        self.numbers.append((level, [f"{kind} {name};", *(line.replace(RESULT, name) for line in lines)]))
        return name

    def at(self, of: str, column: str, given: Iterable[str] = ()) -> str:
        """The number that is the element of a column, C text that reads the numbers `given`."""
        lines = ["{", f"    const int column = {column};"]
        for x in self.closure([of]):
            lines += indented(self._definition(x, f"({self.elements[x].memory})[column]"))
        name = self.number(self.elements[of].kind, [*lines, f"    {RESULT} = {of};", "}"], [of, *given])
        self.read_at += [(x, self.levels[name]) for x in self.closure([of]) if self.elements[x].memory]
        return name

    def reduced(self, op: str, kind: str, of: str, where: str = "") -> str:
        """The name of a reduction of elements as numbers of a C type. Equations with the same reduction share it."""
        if op == "Sum" and of in self.sums:
            return self.sums[of]
        found = Reduction(max(self.levels[x] for x in (of, where) if x), op, kind, of, where)
        for name, other in self.reductions.items():
            if other == found:
                return name
        name = f"n{len(self.levels)}"
        self.levels[name] = found.level + 1
        self.reductions[name] = found
        return name

    def closure(self, names: Iterable[str]) -> list[str]:
        """These elements and all that they read, in the order of their definitions."""
        needed, left = set[str](), list(names)
        while left:
            x = left.pop()
            if x not in needed:
                needed.add(x)
                left += self.elements[x].needs
        return [x for x in self.elements if x in needed]

    def _definition(self, name: str, loaded: str) -> list[str]:
        """The statements that define an element; an argument has the value `loaded`."""
        element = self.elements[name]
        if element.memory:
            return [f"const {element.kind} {name} = {loaded};"]
        return [f"{element.kind} {name};", *element.lines]

    def last_read(self, argument: str, stored: Iterable[str]) -> int:
        """The number of the last round that reads an argument, or before which a number of the row reads it.

        Args:
            stored: the elements that are results.
        """
        rounds = [self.levels[x] for x in stored if argument in self.closure([x])]
        rounds += [r.level for r in self.reductions.values() if argument in self.closure([r.where or r.of, r.of])]
        return max([*rounds, *(level for x, level in self.read_at if x == argument)], default=0)

    def lines(self, room: int) -> tuple[list[str], int]:
        """The statements, and the bytes of shared memory that they use, at most `room`."""
        stored: dict[str, list[str]] = {}  # of each element that is a result, the pointers to where it is stored
        after = []
        for i, v in enumerate(self.body.outputs):
            made = self.rows.made(v)
            if made.kind == ROW:
                stored.setdefault(self.names[made], []).append(f"y{i} + {made.place}")
            else:
                after.append(f"if (threadIdx.x == 0) y{i}[row] = {self.names[made]};")
        rounds = max(self.levels.values(), default=0) + 1
        last = [{x: to for x, to in stored.items() if self.levels[x] == level} for level in range(rounds)]
        own = [{n: r for n, r in self.reductions.items() if r.level == level} for level in range(rounds)]
        needed = [
            self.closure([*stores, *(r.where or r.of for r in found.values())])
            for stores, found in zip(last, own, strict=True)
        ]
        arguments = [name for name, e in self.elements.items() if e.own]
        used = {x: [i for i, names in enumerate(needed) if x in names] for x in arguments}
        held: dict[str, tuple[int, int]] = {}  # of each argument the offset in shared memory, and how many columns
        size = 0
        for x in arguments:
            if len(used[x]) > 1:
                wide = -(-self.rows.length // VECTOR) * VECTOR
                columns = min(wide, (room - size) // self.elements[x].own // VECTOR * VECTOR)
                held[x] = size, min(columns, self.rows.length)
                size += columns * self.elements[x].own
        text = [
            f"{self.elements[x].kind} *const held_{x} = ({self.elements[x].kind} *)(shared_bytes + {place});"
            for x, (place, columns) in held.items()
            if columns
        ]
        for level in range(rounds):
            text += [line for own_level, lines in self.numbers if own_level == level for line in lines]
            if last[level] and any(at == level for _, at in self.read_at):
                text.append("__syncthreads(); // a result may overwrite an argument that other threads read above")
            if needed[level] or own[level]:
                first = {x for x in held if used[x][0] == level}
                text += self._round(last[level], own[level], needed[level], held, first)
        return [*text, *after], size

    def _round(
        self,
        stored: Mapping[str, Sequence[str]],
        reductions: Mapping[str, Reduction],
        needed: Sequence[str],
        held: Mapping[str, tuple[int, int]],
        first: Iterable[str],
    ) -> list[str]:
        """The loop over the columns that reduces and stores elements. It is the first to read the arguments `first`."""
        ahead, loads, keeps = [], [], []  # from device memory; from shared memory; to shared memory
        for x in (x for x in needed if self.elements[x].memory):
            kind, memory = self.elements[x].kind, f"{self.elements[x].memory} + start"
            columns = held.get(x, (0, 0))[1]
            whole = columns == self.rows.length
            if whole and x not in first:
                loads.append(f"const auto loaded_{x} = load<{kind}, WIDTH>(held_{x} + start);")
                continue
            if columns and x in first:
                keeps.append(f"{'' if whole else f'if (start < {columns}) '}store(held_{x}, start, loaded_{x});")
            elif columns:
                memory = f"start < {columns} ? held_{x} + start : {memory}"
            ahead.append((f"Vector<{kind}, WIDTH> ahead_{x}[ITEMS];", f"ahead_{x}[k] = load<{kind}, WIDTH>({memory});"))
            loads.append(f"const auto loaded_{x} = ahead_{x}[k];")
        body = []
        for x in needed:
            body += self._definition(x, f"loaded_{x}.lane[j]")
        anywhere, rest = [], []
        for name, r in reductions.items():
            part = f"part_{name}[(k * WIDTH + j) % {PARTS}]"
            reduce = f"{part} = {r.op}::of({part}, ({r.kind}){r.of});"
            if not r.where:
                body.append(reduce)
                continue
            anywhere.append(f"bool any_{name} = false;")
            body.append(f"any_{name} = any_{name} || {r.where};")
            again = [line for x in self.closure([r.where, r.of]) for line in self._definition(x, f"loaded_{x}.lane[j]")]
            rest += [f"if (any_{name}) {{", *indented(_columns([*again, f"if ({r.where}) {reduce}"])), "}"]
        body += [f"stored_{x}.lane[j] = {x};" for x in stored]
        in_round = [
            *(array for array, _ in ahead),
            *(self._vectors([load for _, load in ahead]) if ahead else []),
            *self._vectors(
                [
                    *loads,
                    *keeps,
                    *(f"Vector<{self.elements[x].kind}, WIDTH> stored_{x};" for x in stored),
                    *anywhere,
                    *_columns(body),
                    *rest,
                    *(f"store({to}, start, stored_{x});" for x, places in stored.items() for to in places),
                ]
            ),
        ]
        identities = {name: f"{r.op}::identity<{r.kind}>()" for name, r in reductions.items()}
        return [
            *(f"{r.kind} part_{n}[{PARTS}] = {{{', '.join([identities[n]] * PARTS)}}};" for n, r in reductions.items()),
            "#pragma unroll 1",
            f"for (int first = threadIdx.x * WIDTH; first < {self.rows.length}; first += THREADS * ITEMS * WIDTH) {{",
            *indented(in_round),
            "}",
            *(f"const {r.kind} {name} = over_block<{r.op}>({_joined(name, r.op)});" for name, r in reductions.items()),
        ]

    def _vectors(self, lines: Sequence[str]) -> list[str]:
        """Statements for the vector of columns that begins at `start`, for each of ITEMS in a round."""
        start = "const int start = first + k * THREADS * WIDTH;"
        inside = [f"if (start < {self.rows.length}) {{", *indented(lines), "}"]
        return ["#pragma unroll", "for (int k = 0; k < ITEMS; k++) {", *indented([start, *inside]), "}"]


RESULT = "RESULT"
"""Stands for the name that is defined."""


def _columns(lines: Sequence[str]) -> list[str]:
    """Statements for each column of a vector, with its number `column` and its lane `j`."""
    body = ["const int column = start + j;", *lines]
    return ["#pragma unroll", "for (int j = 0; j < WIDTH; j++) {", *indented(body), "}"]


def _joined(name: str, op: str) -> str:
    """The partial results of a thread as one."""
    pairs = [f"{op}::of(part_{name}[{i}], part_{name}[{i + 1}])" for i in range(0, PARTS, 2)]
    return f"{op}::of({', '.join(pairs)})"


def long_rows(body: Program, target: Target) -> tuple[Part, int, int]:
    """The part for a `long_rows` body, the threads of a block, and the blocks for which there are registers."""
    rows = rows_in(body)
    assert rows is not None
    of_rows = [v for v in (*body.inputs, *body.outputs) if rows.held(v.type.shape) == ROW]
    writer = LongRows(body, rows, rounded=all(v.type.dtype in (BITS, np.bool_) for v in of_rows))
    itemsize = max((v.type.dtype.itemsize for v in of_rows), default=VECTOR)
    width = vector_width(rows.length, itemsize)
    vectors, items = rows.length // width, LOADS * VECTOR // (width * itemsize)
    text, size = writer.lines(target.shared - OWN_SHARED)
    resident = resident_blocks(size + OWN_SHARED, target)  # of two blocks, one loads while the other computes
    threads = max(MIN_THREADS, min(power_of_two(-(-vectors // items)), MAX_THREADS // resident))
    lines = [
        f"constexpr int WIDTH = {width}, ITEMS = {min(items, -(-vectors // threads))};",
        "const int64_t row = block;",
        *text,
    ]
    checked = any(e.primitive.name in BY_INDEX for e in body.equations)
    headers = ("common/block_ops.cuh",)
    part = Part(lines, body.inputs, body.outputs, headers, blocks=rows.count, shared=size, checked=checked)
    return part, threads, resident


def may_overwrite(body: Program, argument: Variable, result: Variable) -> bool:
    """Whether a result of a `long_rows` body may have the memory of an argument.

    Each element of a row is read by the block of that row alone, and in the round that stores the result by the thread
    that stores it. So no later round may read the argument.
    """
    rows = rows_in(body)
    assert rows is not None
    writer = LongRows(body, rows, rounded=False)
    read = {rows.read(argument, e) for e in body.equations if argument in e.inputs}
    made = rows.made(result)
    if argument.type != result.type or made.kind != ROW or {x.kind for x in read} != {ROW}:
        return False
    if {x.place for x in read} != {made.place}:
        return False
    results = [writer.names[x] for v in body.outputs if (x := rows.made(v)).kind == ROW]
    last = max(writer.last_read(writer.names[x], results) for x in read)
    return last <= writer.levels[writer.names[made]]


Rule = Callable[[LongRows, Equation, Sequence[str]], "list[str]"]
"""``rule(rows, equation, names of its inputs)`` defines its results and returns their names."""


def _reduction(rows: LongRows, e: Equation, given: Sequence[str], op: str) -> list[str]:
    return [rows.reduced(op, c_type(e.outputs[0].type.dtype), given[0])]


def _softmax(rows: LongRows, e: Equation, given: Sequence[str], logarithm: bool) -> list[str]:
    (x,), kind = given, c_type(e.inputs[0].type.dtype)
    top = rows.reduced("Max", kind, x)
    below = rows.element(kind, [f"{RESULT} = {x} - {top};"], [x, top])
    term = rows.element(kind, [f"{RESULT} = {rows.exp}({below});"], [below])
    total = rows.reduced("Sum", kind, term)
    if logarithm:
        shift = rows.number(kind, [f"{RESULT} = log({total});"], [total])
        return [rows.element(kind, [f"{RESULT} = {below} - {shift};"], [below, shift])]
    shift = rows.number(kind, [f"{RESULT} = 1 / {total};"], [total])
    return [rows.element(kind, [f"{RESULT} = {term} * {shift};"], [term, shift])]


def _argmax(rows: LongRows, e: Equation, given: Sequence[str]) -> list[str]:
    """The column of the first maximum. NaN counts as the maximum, as in NumPy."""
    (x,) = given
    top = rows.reduced("Max", c_type(e.inputs[0].type.dtype), x)
    found = rows.element("bool", [f"{RESULT} = {x} == {top} || {x} != {x};"], [x, top])
    first = rows.reduced("Min", "int", rows.element("int", [f"{RESULT} = column;"], []), where=found)
    return [rows.number("int64_t", [f"{RESULT} = {first};"], [first])]


def _standardize(rows: LongRows, e: Equation, given: Sequence[str]) -> list[str]:
    """Mean 0 and variance 1. The first element is subtracted before, so that numbers that are all alike become 0."""
    (x,), kind, eps = given, c_type(e.inputs[0].type.dtype), literal(e.params["eps"])
    start = rows.at(x, "0")
    near = rows.element(kind, [f"{RESULT} = {x} - {start};"], [x, start])
    total = rows.reduced("Sum", kind, near)
    shift = rows.number(kind, [f"{RESULT} = {total} / ({kind}){rows.rows.length};"], [total])
    mean = rows.number(kind, [f"{RESULT} = {start} + {shift};"], [start, shift])
    centred = rows.element(kind, [f"{RESULT} = {near} - {shift};"], [near, shift])
    squares = rows.reduced("Sum", kind, rows.element(kind, [f"{RESULT} = {centred} * {centred};"], [centred]))
    variance = rows.number(kind, [f"{RESULT} = {squares} / ({kind}){rows.rows.length};"], [squares])
    inverse = rows.number(kind, [f"{RESULT} = 1 / sqrt({variance} + ({kind}){eps});"], [variance])
    return [rows.element(kind, [f"{RESULT} = {centred} * {inverse};"], [centred, inverse]), mean, variance]


def _checked(rows: LongRows, index: str, length: int) -> str:
    """The index as a number, or -1 if it is out of range."""
    return rows.number("int", [f"{RESULT} = in_block::valid({index}, {length}, bad) ? (int){index} : -1;"], [index])


def _take_along_axis(rows: LongRows, e: Equation, given: Sequence[str]) -> list[str]:
    (x, index), kind = given, c_type(e.outputs[0].type.dtype)
    column = _checked(rows, index, rows.rows.length)
    found = rows.at(x, f"{column} < 0 ? 0 : {column}", [column])
    return [rows.number(kind, [f"{RESULT} = {column} < 0 ? ({kind})0 : {found};"], [column, found])]


def _take(rows: LongRows, e: Equation, given: Sequence[str]) -> list[str]:
    (table, index), kind = given, c_type(e.outputs[0].type.dtype)
    place = _checked(rows, index, e.inputs[0].type.shape[0])
    return [rows.number(kind, [f"{RESULT} = {place} < 0 ? ({kind})0 : {table}[{place}];"], [place])]


def _scatter_along_axis(rows: LongRows, e: Equation, given: Sequence[str]) -> list[str]:
    (ct, index), kind = given, c_type(e.outputs[0].type.dtype)
    place = _checked(rows, index, rows.rows.length)
    scattered = rows.element(kind, [f"{RESULT} = column == {place} ? {ct} : ({kind})0;"], [ct, place])
    rows.sums[scattered] = rows.number(kind, [f"{RESULT} = {place} < 0 ? ({kind})0 : {ct} + ({kind})0;"], [ct, place])
    return [scattered]


def _one_hot(rows: LongRows, e: Equation, given: Sequence[str]) -> list[str]:
    place = _checked(rows, given[0], rows.rows.length)
    return [rows.element(c_type(e.outputs[0].type.dtype), [f"{RESULT} = column == {place};"], [place])]


RULES: Mapping[str, Rule] = {
    "sum": partial(_reduction, op="Sum"),
    "max": partial(_reduction, op="Max"),
    "min": partial(_reduction, op="Min"),
    "argmax": _argmax,
    "softmax": partial(_softmax, logarithm=False),
    "log_softmax": partial(_softmax, logarithm=True),
    "standardize": _standardize,
    "take": _take,
    "take_along_axis": _take_along_axis,
    "scatter_along_axis": _scatter_along_axis,
    "one_hot": _one_hot,
}
"""By primitive name. Elementwise equations have one rule; a reshape needs none."""
