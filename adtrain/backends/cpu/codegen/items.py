"""Batchwise loops: C that computes several equations item by item, with intermediate values in a thread's scratch.

A step computes one item, or several small ones. Then calls take less of the time, and the sums of several items are
computed side by side. A step computes a slice of a long item, so that its values stay in the nearest cache: some
channels of an image, from the same channels of the arguments.

Sums over the items are split into a fixed number of parts. One thread adds the items of a part in order, and the parts
are added in order, so that the result does not depend on the threads. A part of many items is added in blocks, and the
sums of blocks in double, so that the error does not grow with the number of items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from adtrain.backends.cpu.codegen.loops import item_loops, some_item_loops
from adtrain.backends.cpu.codegen.text import Writer
from adtrain.backends.cpu.fusions import is_divisible, item_count, item_kernel, item_rule, sums_items
from adtrain.codegen.elementwise import c_type, pointer
from adtrain.core.kernel import CKernel, value_for
from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable, body_of, joined, related_axes, renamed
from adtrain.core.types import ArrayType
from adtrain.passes.fusion import by_element
from adtrain.passes.plan_memory import Arena, aligned_to_cache_line

SLICE_BYTES = 1 << 13
"""Maximum bytes of each value in a slice."""
MIN_SLICE_BYTES = 1 << 10
"""Minimum bytes of the largest value in a slice. In shorter slices the calls of functions take too much of the time."""


@dataclass(frozen=True)
class Slices:
    """How the items of a body are divided.

    Attributes:
        body: the same equations on the values of one slice.
        count: the number of slices of an item.
        whole: for each value of a slice the value of the items.
        steps: for each value of a slice that is read or written whole, the elements from a slice to the next one.
        adds: whether a sum is over the slices, too.
    """

    body: Program
    count: int
    whole: Mapping[Variable, Variable]
    steps: Mapping[Variable, int]
    adds: bool


def slices_of(body: Program) -> Slices:
    """The fewest slices of an item that are small enough; one slice if the items cannot be divided."""
    for axes in joined(related_axes(body.equations)) if _is_worth_it(body) else ():
        if (found := _sliced(body, dict(axes), len(axes))) is not None:
            return found
    return undivided(body)


def undivided(body: Program) -> Slices:
    """One slice, which is the item."""
    values = (*body.inputs, *(v for e in body.equations for v in e.outputs))
    return Slices(body, 1, {v: v for v in values}, {}, False)


def _item_bytes(v: Variable) -> int:
    return v.nbytes // max(v.type.shape[0], 1) if v.type.shape else 0


def _is_worth_it(body: Program) -> bool:
    """Whether several equations work on long items, and can work on a slice."""
    computed = [e for e in body.equations if not e.has(Trait.RESHAPE)]
    largest = max((_item_bytes(v) for e in computed for v in (*e.inputs, *e.outputs)), default=0)
    return len(computed) > 1 and largest > SLICE_BYTES and all(map(_by_slice, body.equations))


def _by_slice(equation: Equation) -> bool:
    """Whether its function computes arrays of any lengths along the axes that move together."""
    if by_element(equation) or equation.has(Trait.RESHAPE):
        return True
    kernel = item_kernel(equation)
    return kernel is not None and equation.axes.leading and not (kernel.prepared or kernel.collected or kernel.checked)


def _sliced(body: Program, at: Mapping[Variable, int], axes: int) -> Slices | None:
    """The slices along axes that move together, `at` one of each value.

    None if an axis is not the first one of the items, or no slice has a useful size.
    """
    if len(at) < axes:  # two axes of one value
        return None
    length, count = max(v.type.shape[axis] for v, axis in at.items()), item_count(body.equations)
    by_item = {v for e in body.equations for v in _items_of(e)}
    rows = [v.nbytes // (count * length) for v in at if v in by_item]
    lengths = [n for n in range(1, length + 1) if length % n == 0 and n * max(rows, default=0) <= SLICE_BYTES]
    next_axes = all(_is_next(v, axis, v in by_item, count) for v, axis in at.items())
    if not next_axes or not lengths or lengths[-1] == length:
        return None
    if lengths[-1] * max(rows, default=0) < MIN_SLICE_BYTES:
        return None
    if not all(_follows(e, at) for e in body.equations):
        return None
    part = lengths[-1]
    names = {
        v: v.like(ArrayType((*v.type.shape[:axis], part, *v.type.shape[axis + 1 :]), v.type.dtype))
        for v, axis in at.items()
    }
    values = (*body.inputs, *(v for e in body.equations for v in e.outputs))
    inputs, outputs = (tuple(names.get(v, v) for v in group) for group in (body.inputs, body.outputs))
    sliced = replace(body, inputs=inputs, outputs=outputs, equations=tuple(_of_slice(e, names) for e in body.equations))
    steps = {names[v]: part * prod(v.type.shape[axis + 1 :]) for v, axis in at.items()}
    adds = any(v not in at for e in body.equations if sums_items(e) for v in e.outputs)
    return Slices(sliced, length // part, {names.get(v, v): v for v in values}, steps, adds)


def _of_slice(equation: Equation, names: dict[Variable, Variable]) -> Equation:
    e = renamed(equation, names)
    return replace(e, params={**e.params, "shape": e.outputs[0].type.shape}) if "shape" in e.params else e


def _is_next(v: Variable, axis: int, by_item: bool, count: int) -> bool:
    """Whether an axis is the first one of an item, or of a value that is not by item. Axes of length 1 do not count."""
    shape = v.type.shape
    if not by_item:
        return prod(shape[:axis]) == 1
    return axis > 0 and shape[0] == count and prod(shape[1:axis]) == 1


def _items_of(equation: Equation) -> list[Variable]:
    """The values that an equation reads or computes item by item."""
    read = [v for v, flag in zip(equation.inputs, item_rule(equation).flags, strict=True) if flag]
    return read if sums_items(equation) else [*read, *equation.outputs]


def _follows(equation: Equation, at: Mapping[Variable, int]) -> bool:
    """Whether each result is of the same slice as the arguments, or a sum over items and slices."""
    axes = equation.axes.undivided()
    read = {labels[at[v]] for v, labels in zip(equation.inputs, axes.arguments, strict=True) if v in at}
    for y, labels in zip(equation.outputs, axes.results, strict=True):
        if y in at and (not labels[at[y]] or read - {labels[at[y]]}):
            return False
        if y not in at and not (sums_items(equation) and len(read) == 1 and read <= axes.added):
            return False
    return True


PARTS, PARTS_OF_LARGE = 16, 8
"""Parts of a sum over items, in general and of LARGE_SUM bytes or more."""
BLOCK_ADDITIONS = 64
"""Additions to a part in the type of the sum: one for each step, the items or the slice that are computed at once."""
LARGE_SUM = 1 << 20
TOTAL_BYTES = 8
"""Bytes of an element of a part's total: double or int64_t."""


def _sums(body: Program) -> list[Equation]:
    return [e for e in body.equations if e.form != LOOPS and sums_items(e)]


def _most_parts(equation: Equation) -> int:
    return PARTS if sum(v.nbytes for v in equation.outputs) < LARGE_SUM else PARTS_OF_LARGE


class SumsOverItems:
    """Sums in parts: the memory of a part, and the loops that compute and add the parts.

    A part of many steps is divided into blocks. Its memory holds the totals, in double, then the sums of one block.
    A part of few steps is one block, and its totals are the sums of the block.

    Attributes:
        blocks: whether parts are divided into blocks.
        block_at: byte of a part at which the sums of a block begin; these have `size` bytes.
        sum_at: byte of each sum among the sums of a block.
        total_at: byte of each total in a part.
        stride: bytes of a part.
    """

    def __init__(self, writer: Writer, body: Program, steps: int, workspace: str, slices: Slices) -> None:
        self.writer, self.steps, self.workspace = writer, steps, workspace
        self.slices = slices
        self.block_steps = max(1, BLOCK_ADDITIONS // slices.count) if slices.adds else BLOCK_ADDITIONS
        self.parts = min((min(_most_parts(e), max(steps, 1)) for e in _sums(body)), default=0)
        self.blocks = steps > self.parts * self.block_steps
        self.sum_at: dict[Variable, int] = {}
        self.total_at: dict[Variable, int] = {}
        self.size = totals = 0
        for e in _sums(body):
            for v in e.outputs:
                self.sum_at[v], self.total_at[v] = self.size, totals if self.blocks else self.size
                self.size += aligned_to_cache_line(v.nbytes)
                totals += aligned_to_cache_line(TOTAL_BYTES * v.size)
        self.block_at = totals if self.blocks else 0
        self.stride = self.block_at + self.size

    @property
    def nbytes(self) -> int:
        return self.parts * self.stride

    def addresses(self) -> dict[Variable, str]:
        """The address of each sum in a block. Of a value of a slice, the address of the slice's elements."""
        found = {v: f"({pointer(v)})(part + {self.block_at + at})" for v, at in self.sum_at.items()}
        return {
            v: f"({found[whole]} + slice * {self.slices.steps[v]})" if v in self.slices.steps else found[whole]
            for v, whole in self.slices.whole.items()
            if whole in found
        }

    def _total(self, v: Variable) -> str:
        """The C type of the totals of a sum."""
        return "double" if self.blocks and v.type.dtype.kind == "f" else c_type(v.type.dtype)

    def _summed_steps(self, starts: Sequence[str], inside: Sequence[str], ends: Sequence[str]) -> list[str]:
        """C that sums the steps `first` to `last` - 1 of a part."""
        add = [*starts, "for (int64_t n = first; n < last; n++) {", *(f"    {line}" for line in inside), "}", *ends]
        if not self.blocks:
            return [f"memset(part, 0, {self.size});", *add]
        lines = [f"memset(part, 0, {self.block_at});", "const int64_t part_end = last;"]
        lines += [f"for (; first < part_end; first += {self.block_steps}) {{"]
        lines += [f"    memset(part + {self.block_at}, 0, {self.size});"]
        lines += [f"    last = first + {self.block_steps} < part_end ? first + {self.block_steps} : part_end;"]
        lines += [f"    {line}" for line in add]
        for v, at in self.sum_at.items():
            block = f"({pointer(v)})(part + {self.block_at + at})"
            total = f"({self._total(v)} *)(part + {self.total_at[v]})"
            lines.append(f"    {self._add_block(v)}({block}, {total}, {v.size});")
        return [*lines, "}"]

    def _add_block(self, v: Variable) -> str:
        """A function that adds the sums of a block to the totals."""
        parameters = f"{pointer(v, const=True)}x, {self._total(v)} *total, int64_t size"
        return self.writer.function("add_block", parameters, ["for (int64_t i = 0; i < size; i++) total[i] += x[i];"])

    def _add_parts(self, v: Variable) -> str:
        """A function of the team that adds the totals of the parts, which begin at x."""
        total = self._total(v)
        lines = [
            "int64_t begin, end;",
            "my_cache_lines(team, size, &begin, &end);",
            "for (int64_t i = begin; i < end; i++) {",
            f"    {total} sum = ((const {total} *)x)[i];",
            f"    for (int64_t p = 1; p < {self.parts}; p++) sum += ((const {total} *)(x + p * stride))[i];",
            "    y[i] = sum;",
            "}",
        ]
        parameters = f"const Team *team, const char *x, int64_t stride, {pointer(v)}y, int64_t size"
        return self.writer.function("add_parts", parameters, lines)

    def lines(
        self, starts: Sequence[str], inside: Sequence[str], ends: Sequence[str], place: Callable[[Variable], str]
    ) -> list[str]:
        """C for the parts, to which `inside` adds one step, and for the sums of the parts.

        Args:
            starts: C before the first step of a part or block.
            ends: C after the last one.
        """
        lines = [
            "#pragma omp for schedule(dynamic, 1) nowait",
            f"for (int64_t p = 0; p < {self.parts}; p++) {{",
            f"    char *part = {self.workspace} + p * {self.stride};",
            f"    int64_t first = {self.steps} * p / {self.parts}, last = {self.steps} * (p + 1) / {self.parts};",
            *(f"    {line}" for line in self._summed_steps(starts, inside, ends)),
            "}",
            "#pragma omp barrier",
        ]
        for v, at in self.total_at.items():
            arguments = f"team, {self.workspace} + {at}, {self.stride}, {place(v)}, {v.size}"
            lines.append(f"{self._add_parts(v)}({arguments});")
        return lines


ROWS_AHEAD = 4
"""Minimum items ahead for which a gathered row is prefetched; the hardware cannot predict its address."""
SMALL_STEP = 1 << 13
"""Bytes of a step's results below which a static schedule is faster."""
STEP_BYTES = 1 << 11
"""Maximum bytes of each value in a step of several items. All values of a step should stay in the nearest cache."""
PRODUCT_ITEMS = 32
"""Items of a step with matrix products, which read their weights once for several items. Its values should stay in the
second cache."""
MIN_STEPS = 64
"""Minimum steps if they have several items, so that there is work for many threads."""


@dataclass(frozen=True)
class _Step:
    """C for a step: one item, or several neighbours.

    Attributes:
        count: number of items in all.
        items: number of items in a step.
        varies: whether the last step has fewer items.
        place: the address of a whole array, as a C expression.
        addresses: the addresses of the first item of step n of each value.
        scratch: offset in the thread's scratch of the bytes for kernels.
        own: the values that are computed here.
        prepared: for each equation whose kernel has a prepare function, the offset of its result in scratch.
        collected: the same for each equation whose kernel has a finish function, and what that function adds.
    """

    writer: Writer
    count: int
    items: int
    varies: bool
    place: Callable[[Variable], str]
    addresses: dict[Variable, str]
    scratch: int
    own: frozenset[Variable]
    prepared: dict[Equation, int]
    collected: dict[Equation, int]

    def rows(self, v: Variable) -> int:
        """The number of indices of axis 0 of a value in this step."""
        return v.type.shape[0] * self.items // max(self.count, 1)

    def types(self, equation: Equation) -> list[Any]:
        """The types of the arguments of this step."""
        return _types(equation, self.count, self.items)

    def bytes(self, equation: Equation, memory: str) -> int:
        return _bytes(equation, memory, self.count, self.items)

    def prepare(self, equation: Equation) -> str:
        """C that prepares what the equation's kernel needs for all steps."""
        flags = zip(equation.inputs, item_rule(equation).flags, strict=True)
        shared = [(pointer(v, const=True), self.place(v)) for v, flag in flags if not flag]
        memory = f"team->scratch + {self.prepared[equation]}"
        types = self.types(equation)
        return self.writer.call_beside(_kernel(equation), "prepare", equation, types, shared, memory)

    def start(self, equation: Equation) -> str:
        """C before the first step of a sum whose kernel has a finish function."""
        return f"memset(team->scratch + {self.collected[equation]}, 0, {self.bytes(equation, 'collected')});"

    def finish(self, equation: Equation) -> str:
        """C after the last step of such a sum."""
        outputs = [(pointer(v), self.addresses[v]) for v in equation.outputs]
        memory = f"team->scratch + {self.collected[equation]}"
        types = self.types(equation)
        return self.writer.call_beside(_kernel(equation), "finish", equation, types, outputs, memory)

    def lines(self, equation: Equation) -> list[str]:
        """C that computes the items of this step of an equation's outputs."""
        arguments = [
            self.addresses[v] if flag else self.place(v)
            for v, flag in zip(equation.inputs, item_rule(equation).flags, strict=True)
        ]
        results = [self.addresses[v] for v in equation.outputs]
        if equation.has(Trait.RESHAPE):
            (source,), (target,) = arguments, results
            size = self.items * equation.outputs[0].nbytes // max(self.count, 1)
            return [] if source == target else [f"memcpy({target}, {source}, {size});"]
        if by_element(equation):
            body = body_of(equation)
            of = dict(zip(equation.inputs, arguments, strict=True))
            given = [*(of[v] for v in body.inputs), *results]
            rows = self.rows(body.outputs[0])
            if self.varies:
                return [f"{some_item_loops(self.writer, body)}({', '.join([*given, str(rows)])});"]
            return [f"{item_loops(self.writer, body, rows)}({', '.join(given)});"]
        fetch = self._fetch_rows(equation) if equation.has(Trait.GATHER) else []
        memory = [f"team->scratch + {self.scratch}"] if self.bytes(equation, "scratch") else []
        for offsets in (self.prepared, self.collected):
            memory += [f"team->scratch + {at}" for e, at in offsets.items() if e is equation]
        types = self.types(equation)
        return [*fetch, *self.writer.call(_kernel(equation), equation, types, [*arguments, *results], memory)]

    def _fetch_rows(self, equation: Equation) -> list[str]:
        """C that prefetches the rows that a gather along axis 0 will read for later items."""
        x, indices = equation.inputs
        if equation.params["axis"] != 0 or len(indices.type.shape) > 1 or indices in self.own:
            return []
        row, items, ahead = x.size // max(x.type.shape[0], 1), self.rows(indices), max(ROWS_AHEAD, self.rows(indices))
        end = f"min_i64((n + 1) * {items}, {indices.size - ahead})"
        fetch = f"fetch({self.place(x)} + {self.place(indices)}[i + {ahead}] * {row}, {row * x.type.dtype.itemsize});"
        return [f"for (int64_t i = n * {items}; i < {end}; i++) {fetch}"]


def _kernel(equation: Equation) -> CKernel:
    kernel = item_kernel(equation)
    assert kernel is not None
    return kernel


def _bytes(equation: Equation, memory: str, count: int, items: int) -> int:
    """The bytes of "scratch", "prepared" or "collected" that the equation's kernel needs for `items` items."""
    if by_element(equation) or equation.has(Trait.RESHAPE):
        return 0
    return int(value_for(getattr(_kernel(equation), memory), *_types(equation, count, items), **equation.kernel_params))


def _types(equation: Equation, count: int, items: int) -> list[Any]:
    """The types of the arguments of a step of `items` of `count` items."""
    return [
        ArrayType((v.type.shape[0] * items // max(count, 1), *v.type.shape[1:]), v.type.dtype) if flag else v.type
        for v, flag in zip(equation.inputs, item_rule(equation).flags, strict=True)
    ]


def _by_item(body: Program) -> set[Variable]:
    """The values that are read or computed item by item."""
    read = {v for e in body.equations for v, flag in zip(e.inputs, item_rule(e).flags, strict=True) if flag}
    return read.union(*(e.outputs for e in body.equations if not sums_items(e)))


def _steps(body: Program) -> tuple[int, int, int]:
    """The number of items in a step, the number of such steps, and the number of items in one more step, or 0."""
    count, items = item_count(body.equations), 1
    if not all(map(is_divisible, body.equations)):
        return items, count, 0
    most = STEP_BYTES // max(1, *(v.nbytes // max(count, 1) for v in _by_item(body)))
    if any(e.has(Trait.MATMUL) for e in body.equations):
        most = PRODUCT_ITEMS
    while 2 * items <= most and count // (2 * items) >= MIN_STEPS:
        items *= 2
    return items, count // items, count % items


def sums_workspace(equation: Equation) -> int:
    """Bytes of the parts of the sums over items."""
    body = body_of(equation)
    items, steps, rest = _steps(body)
    return SumsOverItems(Writer(), body, steps + bool(rest), "", _slices(body, items)).nbytes


def _slices(body: Program, items: int) -> Slices:
    return slices_of(body) if items == 1 else undivided(body)


def emit_items(writer: Writer, equation: Equation, place: Callable[[Variable], str], workspace: str) -> list[str]:
    """The lines of a function of the team that computes `equation`.

    Args:
        place: a C expression for the address of a variable's elements.
        workspace: a C expression for the address of `sums_workspace` bytes.
    """
    body = body_of(equation)
    items, whole, rest = _steps(body)
    steps, count, slices = whole + bool(rest), item_count(body.equations), _slices(body, items)
    sums, body = SumsOverItems(writer, body, steps, workspace, slices), slices.body

    def begin(v: Variable) -> str:
        start = place(slices.whole[v])
        return f"({start} + slice * {slices.steps[v]})" if v in slices.steps else start

    def at(v: Variable) -> str:
        return f"({begin(v)} + n * {items * slices.whole[v].size // max(count, 1)})"

    addresses, scratch = _addresses(body, count, items, at)
    kept: dict[str, dict[Equation, int]] = {"prepared": {}, "collected": {}}
    for memory, offsets in kept.items():
        for e in body.equations:
            if size := _bytes(e, memory, count, items):
                offsets[e] = scratch
                scratch += aligned_to_cache_line(size)
    writer.scratch = max(writer.scratch, scratch + max(_bytes(e, "scratch", count, items) for e in body.equations))
    addresses |= sums.addresses()

    own = frozenset(v for e in body.equations for v in e.outputs)
    step = _Step(writer, count, items, bool(rest), begin, addresses, scratch, own, **kept)
    before = [step.prepare(e) for e in step.prepared]
    inside = [line for e in body.equations for line in step.lines(e)]
    if rest:
        last = [line for e in body.equations for line in replace(step, items=rest).lines(e)]
        inside = [f"if (n < {whole}) {{", *(f"    {x}" for x in inside), "} else {", *(f"    {x}" for x in last), "}"]
    if slices.count > 1:
        inside = [f"for (int64_t slice = 0; slice < {slices.count}; slice++) {{", *(f"    {x}" for x in inside), "}"]
    if sums.sum_at:
        starts, ends = ([f(e) for e in step.collected] for f in (step.start, step.finish))
        return [*before, *sums.lines(starts, inside, ends, place)]
    size = sum(v.nbytes for v in equation.outputs) // max(steps, 1)
    schedule = "static" if size < SMALL_STEP else "dynamic, 1"
    loop = [f"#pragma omp for schedule({schedule}) nowait", f"for (int64_t n = 0; n < {steps}; n++) {{"]
    return [*before, *loop, *(f"    {line}" for line in inside), "}"]


def _addresses(body: Program, count: int, items: int, at: Callable[[Variable], str]) -> tuple[dict[Variable, str], int]:
    """The addresses of step n of each value, and the bytes of scratch for values that are used here only.

    Args:
        at: the address of step n of an argument or a result.
    """
    outputs = set(body.outputs)
    addresses = {v: at(v) for v in _by_item(body).intersection(body.inputs)}
    last_use = {v: i for i, e in enumerate(body.equations) for v in e.inputs}
    root: dict[Variable, Variable] = {}
    arena = Arena()
    born: dict[Variable, int] = {}
    ends: dict[Variable, int] = {}
    for i, e in enumerate(body.equations):
        if sums_items(e):
            continue
        for v in e.outputs:
            if v in outputs:
                addresses[v] = at(v)
            elif e.has(Trait.RESHAPE):
                root[v] = root.get(e.inputs[0], e.inputs[0])
                ends[root[v]] = max(ends.get(root[v], i), last_use.get(v, i))
            else:
                born[v] = i
                ends[v] = max(ends.get(v, i), last_use.get(v, i))
    for e in body.equations:  # a value that is needed reshaped is computed at its place
        if e.has(Trait.RESHAPE) and e.outputs[0] in outputs:
            r = root.get(e.inputs[0], e.inputs[0])
            if born.pop(r, None) is not None:
                addresses[r] = addresses[e.outputs[0]]
    for v, i in born.items():
        arena.add(v, items * v.nbytes // max(count, 1), i, ends[v])
    offsets = arena.offsets()
    for v in born:
        addresses[v] = f"({pointer(v)})(team->scratch + {offsets[v]})"
    for v, r in root.items():
        addresses[v] = addresses[r]
    return addresses, arena.size(offsets)
