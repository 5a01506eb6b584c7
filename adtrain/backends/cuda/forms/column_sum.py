"""Column sums: the sum over the rows of a matrix, with the elementwise equations before and after it, as one kernel.

Examples: the gradient of a bias or of the weight of a norm, summed over the tokens of a batch, and the update by it.
Each thread block computes some columns from all rows, so such a kernel can share a launch with the weight gradients.

Long sums that mostly read the same arrays are one kernel, which reads these and computes common subexpressions once. So
are sums whose totals the same loops read, such as those of the mean and variance of a batch norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Kernel, Part, indented, kernel, part_names
from adtrain.backends.cuda.forms import Form, define
from adtrain.codegen.elementwise import access, c_type, read, statements
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable, arguments_of, body_of, program_of
from adtrain.core.types import Shape
from adtrain.passes.fusion import Fusion, elementwise, reads_by_element, with_shared_views
from adtrain.passes.groups import Groups
from adtrain.passes.simplify import needed_for, remove_dead_code

COLUMN_SUM = "column_sum"
"""A sum over rows, with elementwise equations before and after it. Each thread block of a GPU adds some columns."""

MIN_ELEMENTS = 1 << 16
"""One thread block computes a sum of at most this number of elements (see `fuse_one_block`)."""
MAX_SHARED_ROWS = 1 << 14
"""Maximum rows of a sum that shares a launch. One of more rows has a launch of its own, whose blocks divide them."""
MAX_SUMS = 4
"""Maximum sums of a kernel. A thread holds the totals of its columns in registers."""
MAX_ALONE = 1 << 21
"""Maximum elements of a sum without other equations. A longer one is worth a launch of its own: in a launch with other
gradients it would wait until the arguments of all are ready."""
BLOCK_COLUMNS = 32
"""Columns of a thread block."""
VECTOR = 4
"""Columns of a thread. The columns of a sum must be a multiple of it."""
MAX_ROWS = MAX_COLUMNS = 1 << 30
"""Maximum rows and columns of a sum. The kernel counts them in 32 bits, and the last block counts past the end."""


class ColumnSumFusion(Fusion):
    """A sum over rows, the loops that only it reads, and the loops that read it.

    A broadcast that only it reads is fused too, and the reshape between sequences and their rows. A sum that no loops
    read, such as a gradient for other ranks, becomes one too, so that it can share a launch.

    Sums that are too long to share a launch become one equation if their types are equal and at least half of the bytes
    that one of them reads are read for the others too.
    """

    form = COLUMN_SUM

    def prepared(self) -> Program:
        arguments = {e.inputs[0] for e in self.program.equations if _is_long(e)}
        if not arguments:
            return self.program
        of_sums = with_shared_views(self.program, lambda e: not arguments.isdisjoint((*e.inputs, *e.outputs)))
        return remove_dead_code(of_sums)

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, e = groups.equations[producer], groups.equations[reader]
        if self.readers[value] > 1:
            return False
        if sums_columns(source):
            others = _sums_in(groups, reader)
            alone = len(groups.members[groups.of[reader]]) == 1
            fits = alone or (others and _share(source, _read(groups, producer), others, _read(groups, reader)))
            return bool(fits) and _is_loops(e) and reads_by_element(e, value)
        sums = _sums_in(groups, reader)
        joins = len(sums) == 1 and not _sums_in(groups, producer) and (e in sums or e.has(Trait.RESHAPE))
        return joins and self._is_own(groups, source, sums[0])

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        found = list[tuple[list[int], set[Variable]]]()  # sums, and what they read
        for i, e in enumerate(groups.equations):
            if not _is_long(e) or self._can_wait(groups, i):
                continue
            read = _read(groups, i)
            for sums, others in found:
                alike = _share(e, read, [groups.equations[k] for k in sums], others)
                if alike and all(groups.are_independent(k, i) for k in sums):
                    sums.append(i)
                    others |= read
                    break
            else:
                found.append(([i], read))
        return [sums for sums, _ in found]

    def _can_wait(self, groups: Groups, i: int) -> bool:
        """Whether a sum can share a launch with gradients of weights: no other group reads its total, or what loops
        compute from it."""
        e = groups.equations[i]
        members = set(groups.group_of(i))
        read = {reader for x in members for v in x.outputs for reader in self.program.readers.get(v, ())}
        read_by_loops = not members.isdisjoint(self.program.readers.get(e.outputs[0], ()))
        return _rows(e) <= MAX_SHARED_ROWS and read_by_loops and members.issuperset(read)

    def _is_own(self, groups: Groups, source: Equation, total: Equation) -> bool:
        """Whether loops, a broadcast, or a reshape of their result, compute the argument of a sum for it alone."""
        if len(source.outputs) > 1:
            return False
        if not source.has(Trait.RESHAPE):
            return _is_loops(source) or source.has(Trait.BROADCAST)
        (x,) = source.inputs
        if axes_of_rows(x.type.shape, total.outputs[0].size) is None or self.readers[x] > 1 or x not in groups.producer:
            return False
        return self._is_own(groups, groups.equations[groups.producer[x]], total)

    def alone(self, equation: Equation, readers: Sequence[Equation]) -> bool:
        few = sums_columns(equation) and equation.inputs[0].size <= MAX_ALONE and _rows(equation) <= MAX_SHARED_ROWS
        return few and not any(map(_is_loops, readers))


def _is_long(e: Equation) -> bool:
    """Whether it is a sum over rows that should have a launch of its own."""
    return sums_columns(e) and (_rows(e) > MAX_SHARED_ROWS or e.inputs[0].size >= MAX_ALONE)


def _read(groups: Groups, i: int) -> set[Variable]:
    """What the group of an equation reads."""
    return set(arguments_of(groups.group_of(i)))


def _share(e: Equation, read: set[Variable], sums: Sequence[Equation], others: set[Variable]) -> bool:
    """Whether a sum can share a kernel with others: their types are equal, and they mostly read the same.

    Args:
        read, others: what the groups of the sum, and of the others, read.
    """
    alike = [v.type for v in (*e.inputs, *e.outputs)] == [v.type for v in (*sums[0].inputs, *sums[0].outputs)]
    return alike and len(sums) < MAX_SUMS and 2 * _bytes(read & others) >= min(_bytes(read), _bytes(others))


def _bytes(variables: Iterable[Variable]) -> int:
    return sum(v.nbytes for v in variables)


def _sums_in(groups: Groups, equation: int) -> list[Equation]:
    """The sums of columns in the group of an equation."""
    return [e for e in groups.group_of(equation) if sums_columns(e)]


def shares_launch(equation: Equation) -> bool:
    """Whether it is a `column_sum` equation that can share a launch. One with several sums needs the whole GPU."""
    if equation.form != COLUMN_SUM or len(_totals(equation)) > 1:
        return False
    return _rows(_total(equation)) <= MAX_SHARED_ROWS


def column_blocks(equation: Equation) -> int:
    """The thread blocks of a `column_sum` equation in a shared launch."""
    return -(-_total(equation).outputs[0].size // BLOCK_COLUMNS)


def _rows(total: Equation) -> int:
    return total.inputs[0].size // total.outputs[0].size


def axes_of_rows(shape: Shape, columns: int) -> int | None:
    """The number of the axes of rows: the axes after them have `columns` elements. None if there is no such number."""
    return next((axes for axes in range(len(shape), -1, -1) if prod(shape[axes:]) == columns), None)


def sums_columns(e: Equation) -> bool:
    """Whether an equation is a sum over the rows of a matrix: over the first axes of its argument."""
    if e.primitive.name != "sum" or not e.outputs[0].type.shape:
        return False
    (labels,), (kept,), columns = e.axes.arguments, e.axes.results, e.outputs[0].size
    rows = prod(e.inputs[0].type.shape[: -len(kept)])
    leading = labels[-len(kept) :] == kept
    fits = rows * columns > MIN_ELEMENTS and rows <= MAX_ROWS and columns <= MAX_COLUMNS
    return leading and fits and columns % VECTOR == 0 and e.inputs[0].type.dtype.name in ("float32", TYPE_OF_TOTALS)


def _is_loops(e: Equation) -> bool:
    return e.form == LOOPS or (elementwise(e) and not e.has(Trait.BROADCAST))


THREADS = 256
"""Threads of a block of a launch that computes only such sums."""
ALONE_COLUMNS = 128, 64, BLOCK_COLUMNS
"""Columns of such a block: the first of these that divides the columns. Each block reads the numbers of all rows."""
RESIDENT = 2
"""Such blocks for which a multiprocessor has registers. If rows are divided among blocks, all blocks run at once."""
MIN_ROWS = 512
"""Minimum rows of a block, if rows are divided among blocks."""
TOTAL, TOTAL_BYTES, TYPE_OF_TOTALS = "double", 8, "float64"
"""The type of totals (`TotalOf` of every floating-point type), its size, and its name as an element type."""
OF_SPLIT = f"(({TOTAL} *)own)[(split * SUMS + n) * COLUMNS + column]"
"""C text: the total of sum `n` over the rows of part `split`, in scratch memory."""


def column_sum_kernels(equation: Equation, target: Target) -> list[Kernel]:
    """The launches of a `column_sum` equation that shares none.

    If there are few columns, the rows are divided among blocks too, and a second launch adds their totals in order.
    """
    total = _total(equation)
    columns, rows = total.outputs[0].size, _rows(total)
    wide = next(n for n in ALONE_COLUMNS if columns % n == 0 or n == BLOCK_COLUMNS)
    blocks = -(-columns // wide)
    most = max(1, min(RESIDENT * target.multiprocessors // blocks, rows // MIN_ROWS))
    even = next(s for s in range(most, 0, -1) if rows % s == 0)
    each = rows // even if 2 * even >= most else -(-rows // most)
    splits = -(-rows // each)
    made = column_sum(equation, THREADS, each, wide)
    first = kernel("column_sum", [made], THREADS, resident=RESIDENT)
    if splits == 1:
        return [first]
    lines = [
        "const int column = block * THREADS + threadIdx.x;",
        f"if (column >= {columns}) return;",
        f"constexpr int COLUMNS = {columns}, SUMS = {len(_totals(equation))};",
        f"{TOTAL} totals[SUMS] = {{}};",
        "#pragma unroll 8",
        f"for (int split = 0; split < {splits}; split++)",
        f"    for (int n = 0; n < SUMS; n++) totals[n] += {OF_SPLIT};",
        *after_totals(equation),
    ]
    add = replace(made, lines=lines, blocks=-(-columns // THREADS), shared=0)
    return [first, kernel("column_totals", [add], THREADS)]


def column_sum(equation: Equation, threads: int, each: int | None = None, wide: int = BLOCK_COLUMNS) -> Part:
    """The part for a `column_sum` equation.

    Args:
        each: the rows of a block, if rows are divided among blocks. Then the totals of each go to scratch memory.
        wide: the columns of a block.
    """
    body, totals = flat(body_of(equation)), _totals(equation)
    x, (y,) = addend_of(totals[0], body.equations), totals[0].outputs
    rows, columns, c = _rows(totals[0]), y.size, c_type(x.type.dtype)
    blocks, each = -(-columns // wide), each or rows
    splits = -(-rows // each)
    row, block = ("(first_row + row)", f"block % {blocks}") if splits > 1 else ("row", "block")
    shared = shared_bytes(threads, wide)
    addends = [line for n, total in enumerate(totals) for line in _addends(body, total, row, f"addends[{n}][k]")]
    store = [f"for (int n = 0; n < SUMS; n++) {OF_SPLIT} = totals[n];"] if splits > 1 else after_totals(equation)
    lines = [
        f"constexpr int ROWS = {each}, COLUMNS = {columns}, WIDE = {VECTOR}, SUMS = {len(totals)};",
        *([f"const int split = block / {blocks}, first_row = split * ROWS;"] if splits > 1 else []),
        f"ColumnSum<{c}, THREADS, {wide}, WIDE, SUMS, {shared}> sum({block});",
        f"sum.add_rows<ROWS, COLUMNS>([&](int row, int column, {c} (&addends)[SUMS][WIDE]) {{",
        *indented(addends),
        f"}}{f', min(ROWS, {rows} - first_row)' if rows % each else ''});",
        f"sum.finish<COLUMNS>([&](int column, const {TOTAL} (&totals)[SUMS]) {{",
        *indented(store),
        "});",
    ]
    scratch = splits * len(totals) * columns * TOTAL_BYTES if splits > 1 else 0
    headers = ("common/common.cuh", "reduce/column_sum.cuh")
    return Part(lines, body.inputs, body.outputs, headers, blocks=blocks * splits, shared=shared, scratch=scratch)


def shared_bytes(threads: int, wide: int) -> int:
    """Bytes of shared memory of a block that takes `wide` columns."""
    return threads // (wide // VECTOR) * (wide + VECTOR) * TOTAL_BYTES


def _addends(body: Program, total: Equation, row: str, result: str) -> list[str]:
    """Statements that compute the addends of a sum in some columns of a row."""
    x, (y,) = addend_of(total, body.equations), total.outputs
    needed = needed_for([x], body.equations)
    x = body.before_reshapes(x)
    program = program_of([e for e in needed if not e.has(Trait.RESHAPE)], [x])
    load, values = _loads(program, x.type.shape, y.size, part_names(body.inputs, body.outputs), row, VECTOR)
    compute = [
        "#pragma unroll",
        "for (int k = 0; k < WIDE; k++) {",
        *indented(statements(program, values, [result])),
        "}",
    ]
    return ["{", *indented([*load, *compute]), "}"]


def addend_of(total: Equation, equations: Sequence[Equation]) -> Variable:
    """The value that a sum adds; the float32 one, if the equations convert it to the type of totals for the sum."""
    (x,) = total.inputs
    wider = (e.inputs[0] for e in equations if x in e.outputs and e.primitive.name == "astype")
    return next((v for v in wider if v.type.dtype.name == "float32"), x)


def _totals(equation: Equation) -> Sequence[Equation]:
    """The sums in a `column_sum` equation. All have the same types."""
    return [e for e in flat(body_of(equation)).equations if e.has(Trait.REDUCTION)]


def _total(equation: Equation) -> Equation:
    """The first sum in a `column_sum` equation."""
    return _totals(equation)[0]


def summed_matrix(equation: Equation) -> Variable | None:
    """The matrix whose columns a `column_sum` equation adds as they are in memory; None if it computes what it adds."""
    (x,) = _total(equation).inputs
    return x if x in equation.inputs and len(x.type.shape) == 2 else None


class Sums(NamedTuple):
    """A `column_sum` equation in parts.

    Attributes:
        totals: the sums. All have the same types.
        before: the equations that compute what they add.
        addends: what they add; see `addend_of`.
        after: computes the outputs from the totals and from other arguments.
    """

    totals: Sequence[Equation]
    before: Sequence[Equation]
    addends: Sequence[Variable]
    after: Program


def sums_of(equation: Equation) -> Sums:
    """The parts of a `column_sum` equation, or of a sum that can become one."""
    body, totals = flat(body_of(equation)), _totals(equation)
    addends = [addend_of(total, body.equations) for total in totals]
    whole = {e for total in totals for e in (total, *needed_for(total.inputs, body.equations))}
    after = program_of([e for e in body.equations if e not in whole], body.outputs)
    return Sums(totals, needed_for(addends, body.equations), addends, after)


def after_totals(equation: Equation) -> list[str]:
    """Statements that compute the outputs of a column. `totals` has the total of each sum."""
    body = body_of(equation)
    loads, compute = around_totals(equation, part_names(body.inputs, body.outputs))
    return [*loads, *compute]


def around_totals(equation: Equation, names: dict[Variable, str]) -> tuple[list[str], list[str]]:
    """Statements that load the other arguments of a column, and those that compute its outputs from these and `totals`.

    Args:
        names: the pointers to arguments.
    """
    totals, _, _, after = sums_of(equation)
    (y,) = totals[0].outputs
    loads, values = _loads(after, y.type.shape, y.size, names, "0", 1)
    values |= {e.outputs[0]: f"({c_type(y.type.dtype)})totals[{n}]" for n, e in enumerate(totals)}
    return loads, statements(after, values, [f"y{i}[column]" for i in range(len(after.outputs))])


def _loads(
    program: Program, shape: Shape, columns: int, names: dict[Variable, str], row: str, wide: int
) -> tuple[list[str], dict[Variable, str]]:
    """Statements that load the arguments at a row and `wide` columns from `column` on, and the text of each argument.

    Args:
        shape: of the results of the equations. The last axes are `columns` columns, those before them the rows.
        wide: columns that a thread computes at once. If there are several, the text reads column `column + k`.
    """
    lines, values = [], {}
    split = axes_of_rows(shape, columns)
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


define(Form(COLUMN_SUM, column_sum_kernels, converts=True))
