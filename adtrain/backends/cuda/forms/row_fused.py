"""Row fusion: the narrow end of a network (logits, softmax, cross-entropy and their gradients) as one kernel.

Row n of each of these equations needs row n of the others, and a weight small enough for every thread block to read.
A row lies behind any number of axes, and may have several of its own. So the gradient of a softmax over the last axis
of (B, H, S, S) works by B x H x S rows, and sums over the last two axes of (B, C, H, W) by B x C rows. A norm on
sequences (B, S, F) adds positions (S, F) itself, and its gradient reads the gradient (B, 1, F) of a mean over tokens.

Each thread block takes its own rows through all equations of a body. Long rows, such as those of a loss over the words
of a vocabulary, do not fit in registers. A block takes one such row through all equations, and reads it from device
memory once if it fits into shared memory (`codegen/long_rows.py`). So the loss of a classification, its gradient, and
the most probable class cost one read of the logits and one write of their gradient. Probabilities and one-hot labels
are never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from adtrain.backends.cuda.codegen.long_rows import long_rows, may_overwrite
from adtrain.backends.cuda.codegen.part import Kernel, Part, indented, kernel
from adtrain.backends.cuda.codegen.register_rows import (
    ALONG_ROWS,
    MIN_IN_REGISTERS,
    ROW,
    THREADS,
    Rows,
    register_rows,
    rows_of,
)
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.one_block import is_small, names_of, part_of
from adtrain.backends.cuda.forms.thread_items import MIN_ITEMS
from adtrain.codegen.elementwise import c_type
from adtrain.core.axes import Items
from adtrain.core.kernel import Target
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable, body_of
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm import has_short_k
from adtrain.lowering.shapes import product_lengths
from adtrain.passes.fusion import Fusion, by_element
from adtrain.passes.groups import MAX_EQUATIONS, Groups

ROW_FUSED = "row_fused"
"""Equations that work row by row. Each thread block of a GPU computes all of them for its rows."""

MIN_ROWS = 32
"""Fewer rows are computed by one thread block."""
MAX_WIDTH = 1024
"""Maximum elements of a row."""
MAX_NARROW = 32
"""Maximum of the smaller length of a product's right operand. GEMM kernels are faster for wider ones."""
MAX_WEIGHT = 8 << 10
"""Maximum elements of a product's right operand. Every thread block reads it while it waits for its first row."""
BY_INDEX = frozenset(("take_along_axis", "scatter_along_axis"))
"""Other primitives by rows that the generators of row-wise kernels have code for."""


class RowFusion(Fusion):
    """Each connected group of row-wise equations, which pass rows to one another."""

    limit = MAX_EQUATIONS

    @cached_property
    def found(self) -> list[Items | None]:
        """How each equation works row by row."""
        return self.row_wise()

    def row_wise(self) -> list[Items | None]:
        """How each equation works row by row; None for one that has no part in such a kernel."""
        raise NotImplementedError

    def fits_rows(self, members: Sequence[int]) -> bool:
        """Whether one kernel can compute the equations at these positions."""
        return True

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        rows, consumer, e = self.found[producer], self.found[reader], groups.equations[reader]
        if rows is None or consumer is None or rows.count != consumer.count:
            return False
        if not any(flag for v, flag in zip(e.inputs, consumer.flags, strict=True) if v is value):
            return False
        # A reshape inside the kernel is not stored, so another kernel could not read it.
        if groups.equations[producer].has(Trait.RESHAPE) and self.readers[value] > 1:
            return False
        if e.has(Trait.RESHAPE) and len(groups.members[groups.of[reader]]) == 1:
            return False
        a, b = groups.of[producer], groups.of[reader]
        return self.fits_rows(groups.members[a] + groups.members[b]) and _by_row_only(groups, self.found, a, b)


class RowFusedFusion(RowFusion):
    """Row-wise equations too large for one thread block."""

    form = ROW_FUSED

    @cached_property
    def by_item(self) -> list[Items | None]:
        found = [row_items(e) for e in self.program.equations]
        return without_epilogues(self.program, found, lambda e: e.form == LOOPS)

    @cached_property
    def held(self) -> Mapping[Equation, Rows]:
        return rows_in_registers(self.program)

    @cached_property
    def behind_several(self) -> Collection[Equation]:
        """The equations that work by rows behind several axes, and not item by item, with the reshapes around them."""
        both = zip(self.program.equations, self.by_item, strict=True)
        found = {e for e, by_item in both if by_item is None and e in self.held}
        values = {v for e in found if not e.has(Trait.RESHAPE) for v in (*e.inputs, *e.outputs)}
        return {e for e in found if not values.isdisjoint((*e.inputs, *e.outputs))}

    def row_wise(self) -> list[Items | None]:
        both = zip(self.program.equations, self.by_item, strict=True)
        return [e.rows(self.held[e].count) if e in self.behind_several else by_item for e, by_item in both]

    def fits_rows(self, members: Sequence[int]) -> bool:
        equations = [self.program.equations[i] for i in members]
        rows = {self.held[e] for e in equations if e in self.behind_several}
        return not rows or (len(rows) == 1 and all(self.held.get(e) in rows for e in equations))

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        return readers_of_rows(groups, self.held)

    def saves(self, equations: Sequence[Equation]) -> bool:
        """Whether the group saves launches that a single thread block for all of it would not save.

        Elementwise equations alone have no rows behind several axes. As the epilogue of a product with a short K they
        are computed faster (`short_gemm`).
        """
        launches = [e for e in equations if not e.has(Trait.RESHAPE)]
        by_row = any(map(rows_of, equations)) or not any(e in self.behind_several for e in equations)
        others = [e for e in launches if not by_element(e)]
        only_epilogue = bool(others) and all(map(_has_short_k, others))
        return by_row and len(launches) > 1 and not only_epilogue and not all(map(is_small, launches))


def readers_of_rows(groups: Groups, held: Mapping[Equation, Rows]) -> Iterable[Iterable[int]]:
    """Groups with equations along rows that read the same rows: one kernel for them reads these once.

    Args:
        held: the rows of equations. A group has those of all its equations, if they are the same.
    """
    readers: dict[tuple[Variable, Rows], list[int]] = {}
    for first, members in groups.members.items():
        equations = [groups.equations[i] for i in members]
        rows, *others = {held.get(e) for e in equations}
        if rows and not others and any(map(rows_of, equations)):
            read = ((v, e) for e in equations if not e.has(Trait.RESHAPE) for v in e.inputs)
            for v in dict.fromkeys(v for v, e in read if rows.held_for(v, e) == ROW):
                readers.setdefault((v, rows), []).append(first)
    return readers.values()


def shared_inputs(body: Program) -> set[Variable]:
    """The inputs of a `row_fused` body that every thread block reads completely."""
    found = ((e, row_items(e)) for e in body.equations)
    return {v for e, items in found if items for v, flag in zip(e.inputs, items.flags, strict=True) if not flag}


def without_epilogues(
    program: Program, found: Sequence[Items | None], elementwise: Callable[[Equation], bool]
) -> list[Items | None]:
    """``found`` with None for elementwise equations with one result that read a product whose own entry is None.

    They become its epilogue. An epilogue with several results would write more than the product.
    """
    both = list(zip(program.equations, found, strict=True))
    wide = {v for e, items in both if e.has(Trait.MATMUL) and items is None for v in e.outputs}

    def is_epilogue(e: Equation) -> bool:
        return elementwise(e) and len(e.outputs) == 1 and not wide.isdisjoint(e.inputs)

    return [None if is_epilogue(e) else items for e, items in both]


def rows_in_registers(program: Program) -> dict[Equation, Rows]:
    """The rows of equations that threads with rows in registers can compute."""
    return held_rows(program, _fit)


def held_rows(
    program: Program, fit: Callable[[Rows], bool], also: Collection[str] = frozenset()
) -> dict[Equation, Rows]:
    """The rows of the equations along rows for which `fit` is true, and of equations that pass rows to or from these.

    Elementwise equations, reshapes and equations of the primitives `also` can pass rows.

    Elementwise equations that can join a product or convolution, which only they read, or the gather of rows are left
    out.
    """
    read_once = {v for v, readers in program.readers.items() if len(readers) == 1}
    products = {e for e in program.equations if e.has(Trait.MATMUL) or e.has(Trait.CONVOLUTION)}
    gathers = {e for e in program.equations if e.has(Trait.GATHER)}
    joined = {v for e in products for v in e.outputs if v in read_once} | {v for e in gathers for v in e.outputs}
    users: dict[Variable, list[Equation]] = {}
    for e in program.equations:
        if rows_of(e) or e.has(Trait.RESHAPE) or (by_element(e) and joined.isdisjoint(e.inputs)) or e.name in also:
            for v in (*e.inputs, *e.outputs):
                users.setdefault(v, []).append(e)
    reached = [(v, rows) for e in program.equations if (rows := rows_of(e)) and fit(rows) for v in e.inputs]
    found: dict[Equation, Rows] = {}
    for v, rows in reached:
        for e in users.get(v, ()):
            if e not in found and rows.computes(e):
                found[e] = rows
                reached += [(x, rows) for x in (*e.inputs, *e.outputs) if rows.held(x.type.shape)]
    return found


def _fit(rows: Rows) -> bool:
    """Whether there are many rows, and threads can hold them."""
    return rows.count >= MIN_ROWS and MIN_IN_REGISTERS <= rows.length <= MAX_WIDTH


def row_items(equation: Equation) -> Items | None:
    """How an equation works row by row; None if it does not, or other forms compute its rows faster."""
    e = equation
    narrow = _is_narrow_product(e)
    found = e.items if narrow else rowwise(e)
    if found is None or found.count < MIN_ROWS:
        return None
    by_row = [v for v, flag in zip(e.inputs, found.flags, strict=True) if flag]
    widths = [v.size / found.count for v in (*by_row, *e.outputs)]
    of_threads = found.count >= MIN_ITEMS and (narrow or any(1 < n < MIN_IN_REGISTERS for n in widths))
    return found if not of_threads and all(0 < n <= MAX_WIDTH for n in widths) else None


def rowwise(equation: Equation) -> Items | None:
    """How an equation works row by row; None if it does not, or the generators of rows have no code for it."""
    e = equation
    return e.items if by_element(e) or e.has(Trait.RESHAPE) or e.primitive.name in ALONG_ROWS | BY_INDEX else None


def _is_narrow_product(equation: Equation) -> bool:
    if not equation.has(Trait.MATMUL) or equation.params["precision"] != FULL:
        return False
    a, b = equation.inputs
    return len(a.type.shape) == 2 and a is not b and b.size <= MAX_WEIGHT and min(b.type.shape) <= MAX_NARROW


def _has_short_k(e: Equation) -> bool:
    """Whether it is a product with a short K."""
    if not e.has(Trait.MATMUL):
        return False
    a, b = e.inputs
    return has_short_k(product_lengths(a.type, b.type, e.params["transpose_a"], e.params["transpose_b"]))


def _by_row_only(groups: Groups, found: list[Items | None], a: int, b: int) -> bool:
    """Whether no value of two groups is computed or read by row in one equation and read whole in another."""
    read_whole: set[Variable] = set()
    rows: set[Variable] = set()
    for i in groups.members[a] + groups.members[b]:
        consumer = found[i]
        assert consumer is not None
        rows.update(groups.equations[i].outputs)
        for v, by_row in zip(groups.equations[i].inputs, consumer.flags, strict=True):
            (rows if by_row else read_whole).add(v)
    return rows.isdisjoint(read_whole)


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
        part_for: returns the part for a body of a number of rows, with the pointers to its values.
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


def _kernels(equation: Equation, target: Target) -> list[Kernel]:
    resident = MEMBER_RESIDENT if target.by_member else 1
    return [kernel("row_fused", [row_fused(equation, target)], THREADS, resident=resident)]


define(Form(ROW_FUSED, _kernels, converts=True))


LONG_ROWS = "long_rows"
"""Equations of rows of more than MAX_WIDTH elements. Each thread block of a GPU computes all of them for its row."""
MAX_LENGTH = 1 << 18
"""Maximum elements of a row. A thread adds up to 128 of them in order."""
NORMALIZING = frozenset(("softmax", "log_softmax", "standardize"))
"""Primitives that read their rows more than once where threads do not hold them."""


class LongRowsFusion(RowFusion):
    """Equations of long rows, if there is a row for each multiprocessor."""

    form = LONG_ROWS

    @cached_property
    def held(self) -> Mapping[Equation, Rows]:
        return held_rows(self.program, partial(_fit_long, self.target), BY_INDEX)

    def row_wise(self) -> list[Items | None]:
        return [e.rows(self.held[e].count) if e in self.held else None for e in self.program.equations]

    def fits_rows(self, members: Sequence[int]) -> bool:
        return len({self.held[self.program.equations[i]] for i in members}) == 1

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        return readers_of_rows(groups, self.held)

    def saves(self, equations: Sequence[Equation]) -> bool:
        launches = [e for e in equations if not e.has(Trait.RESHAPE)]
        return len(launches) > 1 and any(map(rows_of, equations))


def _fit_long(target: Target, rows: Rows) -> bool:
    """Whether rows are too long for registers, and each multiprocessor has one."""
    return rows.count >= target.multiprocessors and MAX_WIDTH < rows.length <= MAX_LENGTH


def rows_alone(equation: Equation, target: Target) -> list[Kernel]:
    """The kernel of a softmax or norm that shares no kernel, if threads or a block hold its rows; none otherwise."""
    rows = rows_of(equation) if equation.primitive.name in NORMALIZING else None
    if rows is not None and rows.length <= MAX_WIDTH:
        part = register_rows(body_of(equation), shortest=1)
        return [] if part is None else [kernel(ROW_FUSED, [part], THREADS)]
    if rows is not None and _fit_long(target, rows):
        return _long_kernels(equation, target)
    return []


def _long_kernels(equation: Equation, target: Target) -> list[Kernel]:
    part, threads, resident = long_rows(body_of(equation), target)
    return [kernel(LONG_ROWS, [part], threads, resident=resident)]


def _overwrites(equation: Equation, argument: Variable, result: Variable) -> bool:
    return argument not in equation.inputs or may_overwrite(body_of(equation), argument, result)


define(Form(LONG_ROWS, _long_kernels, converts=True, overwrites=_overwrites))
