"""Batchwise loops: C that computes several equations item by item, with intermediate values in a thread's scratch.

Sums over the items are split into a fixed number of parts. One thread adds the items of a part in order, and the parts
are added in order, so that the result does not depend on the threads. A part of many items is added in blocks, and the
sums of blocks in double, so that the error does not grow with the number of items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adtrain.backends.cpu.codegen.loops import item_loops
from adtrain.backends.cpu.codegen.text import Writer
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.fused import body_of, loops_p
from adtrain.core.kernel import CKernel, value_for
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import ArrayType
from adtrain.passes.arena import Arena, aligned
from adtrain.passes.batchwise import Batchwise, batchwise, item_kernel
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.places import nbytes

PARTS, PARTS_OF_LARGE = 16, 8
"""Parts of a sum over items, in general and of LARGE_SUM bytes or more."""
BLOCK_ITEMS = 64
"""Items of a part that are added in the type of the sum."""
LARGE_SUM = 1 << 20
TOTAL_BYTES = 8
"""Bytes of an element of a part's total: double or int64_t."""
ROWS_AHEAD = 4
"""Items ahead for which a gathered row is prefetched; the hardware cannot predict its address."""
SMALL_ITEM = 1 << 13
"""Bytes of an item's results below which a static schedule is faster."""


def sums_workspace(equation: Equation) -> int:
    """Bytes of the parts of the sums over items."""
    body = body_of(equation)
    return _SumsOverItems(body, _how(body.equations[0]).count, "").nbytes


def _sums(body: Program) -> list[Equation]:
    return [e for e in body.equations if e.primitive is not loops_p and _how(e).sums]


def _parts(equation: Equation) -> int:
    most = PARTS if sum(map(nbytes, equation.outputs)) < LARGE_SUM else PARTS_OF_LARGE
    return min(most, max(_how(equation).count, 1))


def _how(equation: Equation) -> Batchwise:
    found = batchwise(equation)
    assert found is not None
    return found


@dataclass(frozen=True)
class _Item:
    """C for one item.

    Attributes:
        place: the address of a whole array, as a C expression.
        addresses: the addresses of item n of each value.
        scratch: offset in the thread's scratch of the bytes for kernels.
        own: the values that are computed here.
        prepared: for each equation whose kernel has a prepare function, the offset of its result in scratch.
        collected: the same for each equation whose kernel has a finish function, and what that function adds.
    """

    writer: Writer
    place: Callable[[Variable], str]
    addresses: dict[Variable, str]
    scratch: int
    own: frozenset[Variable]
    prepared: dict[Equation, int]
    collected: dict[Equation, int]

    def prepare(self, equation: Equation) -> str:
        """C that prepares what the equation's kernel needs for all items."""
        flags = zip(equation.inputs, _how(equation).flags, strict=True)
        shared = [(pointer(v, const=True), self.place(v)) for v, flag in flags if not flag]
        memory = f"team->scratch + {self.prepared[equation]}"
        return self.writer.call_beside(_kernel(equation), "prepare", equation, item_types(equation), shared, memory)

    def start(self, equation: Equation) -> str:
        """C before the first item of a sum whose kernel has a finish function."""
        return f"memset(team->scratch + {self.collected[equation]}, 0, {_bytes(equation, 'collected')});"

    def finish(self, equation: Equation) -> str:
        """C after the last item of such a sum."""
        outputs = [(pointer(v), self.addresses[v]) for v in equation.outputs]
        memory = f"team->scratch + {self.collected[equation]}"
        return self.writer.call_beside(_kernel(equation), "finish", equation, item_types(equation), outputs, memory)

    def lines(self, equation: Equation) -> list[str]:
        """C that computes this item of an equation's outputs."""
        arguments = [
            self.addresses[v] if flag else self.place(v)
            for v, flag in zip(equation.inputs, _how(equation).flags, strict=True)
        ]
        results = [self.addresses[v] for v in equation.outputs]
        if equation.has(Trait.RESHAPE):
            (source,), (target,) = arguments, results
            size = nbytes(equation.outputs[0]) // equation.outputs[0].type.shape[0]
            return [] if source == target else [f"memcpy({target}, {source}, {size});"]
        if by_element(equation):
            body = body_of(equation)
            of = dict(zip(equation.inputs, arguments, strict=True))
            given = [*(of[v] for v in body.inputs), *results]
            return [f"{item_loops(self.writer, body)}({', '.join(given)});"]
        fetch = self._fetch_row(equation) if equation.has(Trait.GATHER) else []
        memory = [f"team->scratch + {self.scratch}"] if _bytes(equation, "scratch") else []
        for offsets in (self.prepared, self.collected):
            memory += [f"team->scratch + {at}" for e, at in offsets.items() if e is equation]
        call = self.writer.call(_kernel(equation), equation, item_types(equation), [*arguments, *results], memory)
        return [*fetch, *call]

    def _fetch_row(self, equation: Equation) -> list[str]:
        """C that prefetches the row that a gather along axis 0 will read for a later item."""
        x, indices = equation.inputs
        if equation.params["axis"] != 0 or indices in self.own:
            return []
        row = x.size // max(x.type.shape[0], 1)
        later = f"{self.place(indices)}[n + {ROWS_AHEAD}]"
        fetch = f"fetch({self.place(x)} + {later} * {row}, {row * x.type.dtype.itemsize});"
        return [f"if (n + {ROWS_AHEAD} < {indices.type.shape[0]}) {fetch}"]


def _kernel(equation: Equation) -> CKernel:
    kernel = item_kernel(equation)
    assert kernel is not None
    return kernel


def _bytes(equation: Equation, memory: str) -> int:
    """The bytes of "scratch", "prepared" or "collected" that the equation's kernel needs."""
    if by_element(equation) or equation.has(Trait.RESHAPE):
        return 0
    return int(value_for(getattr(_kernel(equation), memory), *item_types(equation), **equation.params))


def item_types(equation: Equation) -> list[Any]:
    """The types of the arguments, with one item of those that are read by item."""
    return [
        ArrayType((1, *v.type.shape[1:]), v.type.dtype) if flag else v.type
        for v, flag in zip(equation.inputs, _how(equation).flags, strict=True)
    ]


def emit_items(writer: Writer, equation: Equation, place: Callable[[Variable], str], workspace: str) -> list[str]:
    """The lines of a function of the team that computes `equation`.

    Args:
        place: a C expression for the address of a variable's elements.
        workspace: a C expression for the address of `sums_workspace` bytes.
    """
    body = body_of(equation)
    count = _how(body.equations[0]).count
    addresses, scratch = _addresses(body, place)
    kept: dict[str, dict[Equation, int]] = {"prepared": {}, "collected": {}}
    for memory, offsets in kept.items():
        for e in body.equations:
            if size := _bytes(e, memory):
                offsets[e] = scratch
                scratch += aligned(size)
    writer.scratch = max(writer.scratch, scratch + max(_bytes(e, "scratch") for e in body.equations))
    sums = _SumsOverItems(body, count, workspace)
    addresses |= sums.addresses()

    own = frozenset(v for e in body.equations for v in e.outputs)
    item = _Item(writer, place, addresses, scratch, own, **kept)
    before = [item.prepare(e) for e in item.prepared]
    inside = [line for e in body.equations for line in item.lines(e)]
    if sums.sum_at:
        starts, ends = ([f(e) for e in item.collected] for f in (item.start, item.finish))
        return [*before, *sums.lines(starts, inside, ends, place)]
    size = sum(nbytes(v) for v in body.outputs) // max(count, 1)
    schedule = "static" if size < SMALL_ITEM else "dynamic, 1"
    loop = [f"#pragma omp for schedule({schedule}) nowait", f"for (int64_t n = 0; n < {count}; n++) {{"]
    return [*before, *loop, *(f"    {line}" for line in inside), "}"]


class _SumsOverItems:
    """Sums in parts: the memory of a part, and the loops that compute and add the parts.

    A part of many items is divided into blocks. Its memory holds the totals, in double, then the sums of one block.
    A part of few items is one block, and its totals are the sums of the block.

    Attributes:
        blocks: whether parts are divided into blocks.
        block_at: byte of a part at which the sums of a block begin; these have `size` bytes.
        sum_at: byte of each sum among the sums of a block.
        total_at: byte of each total in a part.
        stride: bytes of a part.
    """

    def __init__(self, body: Program, count: int, workspace: str) -> None:
        self.count, self.workspace = count, workspace
        self.parts = min(map(_parts, _sums(body)), default=0)
        self.blocks = count > self.parts * BLOCK_ITEMS
        self.sum_at: dict[Variable, int] = {}
        self.total_at: dict[Variable, int] = {}
        self.size = totals = 0
        for e in _sums(body):
            for v in e.outputs:
                self.sum_at[v], self.total_at[v] = self.size, totals if self.blocks else self.size
                self.size += aligned(nbytes(v))
                totals += aligned(TOTAL_BYTES * v.size)
        self.block_at = totals if self.blocks else 0
        self.stride = self.block_at + self.size

    @property
    def nbytes(self) -> int:
        return self.parts * self.stride

    def addresses(self) -> dict[Variable, str]:
        return {v: f"({pointer(v)})(part + {self.block_at + at})" for v, at in self.sum_at.items()}

    def _total(self, v: Variable) -> str:
        """The C type of the totals of a sum."""
        return "double" if self.blocks and v.type.dtype.kind == "f" else c_type(v.type.dtype)

    def _items(self, starts: Sequence[str], inside: Sequence[str], ends: Sequence[str]) -> list[str]:
        """C that sums the items `first` to `last` - 1 of a part."""
        add = [*starts, "for (int64_t n = first; n < last; n++) {", *(f"    {line}" for line in inside), "}", *ends]
        if not self.blocks:
            return [f"memset(part, 0, {self.size});", *add]
        lines = [f"memset(part, 0, {self.block_at});", "const int64_t part_end = last;"]
        lines += [f"for (; first < part_end; first += {BLOCK_ITEMS}) {{"]
        lines += [f"    memset(part + {self.block_at}, 0, {self.size});"]
        lines += [f"    last = first + {BLOCK_ITEMS} < part_end ? first + {BLOCK_ITEMS} : part_end;"]
        lines += [f"    {line}" for line in add]
        for v, address in self.addresses().items():
            total = f"(({self._total(v)} *)(part + {self.total_at[v]}))[i]"
            lines += [f"    for (int64_t i = 0; i < {v.size}; i++) {total} += ({address})[i];"]
        return [*lines, "}"]

    def lines(
        self, starts: Sequence[str], inside: Sequence[str], ends: Sequence[str], place: Callable[[Variable], str]
    ) -> list[str]:
        """C for the parts, to which `inside` adds one item, and for the sums of the parts.

        Args:
            starts: C before the first item of a part or block.
            ends: C after the last one.
        """
        lines = [
            "#pragma omp for schedule(dynamic, 1) nowait",
            f"for (int64_t p = 0; p < {self.parts}; p++) {{",
            f"    char *part = {self.workspace} + p * {self.stride};",
            f"    int64_t first = {self.count} * p / {self.parts}, last = {self.count} * (p + 1) / {self.parts};",
            *(f"    {line}" for line in self._items(starts, inside, ends)),
            "}",
            "#pragma omp barrier",
            "int64_t begin, end;",
        ]
        for v, at in self.total_at.items():
            total = self._total(v)
            lines += [
                f"my_cache_lines(team, {v.size}, &begin, &end);",
                "for (int64_t i = begin; i < end; i++) {",
                f"    const char *x = {self.workspace} + {at} + i * sizeof({total});",
                f"    {total} sum = *(const {total} *)x;",
                f"    for (int64_t p = 1; p < {self.parts}; p++) sum += *(const {total} *)(x + p * {self.stride});",
                f"    ({place(v)})[i] = sum;",
                "}",
            ]
        return lines


def _addresses(body: Program, place: Callable[[Variable], str]) -> tuple[dict[Variable, str], int]:
    """The address of item n of each value, and the bytes of scratch for values that are used here only."""
    by_item = {v for e in body.equations for v, flag in zip(e.inputs, _how(e).flags, strict=True) if flag}
    outputs = set(body.outputs)

    def at(v: Variable) -> str:
        return f"({place(v)} + n * {v.size // max(v.type.shape[0], 1)})"

    addresses = {v: at(v) for v in body.inputs if v in by_item}
    last_use = {v: i for i, e in enumerate(body.equations) for v in e.inputs}
    root: dict[Variable, Variable] = {}
    arena = Arena()
    born: dict[Variable, int] = {}
    ends: dict[Variable, int] = {}
    for i, e in enumerate(body.equations):
        if _how(e).sums:
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
    for v, i in born.items():
        arena.add(v, nbytes(v) // v.type.shape[0], i, ends[v])
    offsets = arena.offsets()
    for v in born:
        addresses[v] = f"({pointer(v)})(team->scratch + {offsets[v]})"
    for v, r in root.items():
        addresses[v] = addresses[r]
    return addresses, arena.size(offsets)
