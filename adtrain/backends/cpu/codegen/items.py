"""Batchwise loops: C that computes several equations item by item, with intermediate values in a thread's scratch.

Sums over the items are split into a fixed number of parts. One thread adds the items of a part in order, and the parts
are added in order, so that the result does not depend on the threads. A part of many items is added in blocks, and the
sums of blocks in double, so that the error does not grow with the number of items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adtrain.backends.cpu.codegen.loops import item_loops
from adtrain.backends.cpu.codegen.sums_over_items import SumsOverItems
from adtrain.backends.cpu.codegen.text import Writer
from adtrain.codegen.expressions import pointer
from adtrain.core.fused import body_of
from adtrain.core.kernel import CKernel, value_for
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import ArrayType
from adtrain.passes.arena import Arena, aligned_to_cache_line
from adtrain.passes.batchwise import item_kernel, item_rule
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.places import nbytes

ROWS_AHEAD = 4
"""Items ahead for which a gathered row is prefetched; the hardware cannot predict its address."""
SMALL_ITEM = 1 << 13
"""Bytes of an item's results below which a static schedule is faster."""


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
        flags = zip(equation.inputs, item_rule(equation).flags, strict=True)
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
            for v, flag in zip(equation.inputs, item_rule(equation).flags, strict=True)
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
        for v, flag in zip(equation.inputs, item_rule(equation).flags, strict=True)
    ]


def emit_items(writer: Writer, equation: Equation, place: Callable[[Variable], str], workspace: str) -> list[str]:
    """The lines of a function of the team that computes `equation`.

    Args:
        place: a C expression for the address of a variable's elements.
        workspace: a C expression for the address of `sums_workspace` bytes.
    """
    body = body_of(equation)
    count = item_rule(body.equations[0]).count
    addresses, scratch = _addresses(body, place)
    kept: dict[str, dict[Equation, int]] = {"prepared": {}, "collected": {}}
    for memory, offsets in kept.items():
        for e in body.equations:
            if size := _bytes(e, memory):
                offsets[e] = scratch
                scratch += aligned_to_cache_line(size)
    writer.scratch = max(writer.scratch, scratch + max(_bytes(e, "scratch") for e in body.equations))
    sums = SumsOverItems(body, count, workspace)
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


def _addresses(body: Program, place: Callable[[Variable], str]) -> tuple[dict[Variable, str], int]:
    """The address of item n of each value, and the bytes of scratch for values that are used here only."""
    by_item = {v for e in body.equations for v, flag in zip(e.inputs, item_rule(e).flags, strict=True) if flag}
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
        if item_rule(e).sums:
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
