"""Batchwise loops: C that computes several equations item by item, with intermediate values in a thread's scratch.

A step computes one item, or several small ones. Then calls take less of the time, and the sums of several items are
computed side by side.

Sums over the items are split into a fixed number of parts. One thread adds the items of a part in order, and the parts
are added in order, so that the result does not depend on the threads. A part of many items is added in blocks, and the
sums of blocks in double, so that the error does not grow with the number of items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from adtrain.backends.cpu.codegen.loops import item_loops, some_item_loops
from adtrain.backends.cpu.codegen.slices import Slices, slices_of, undivided
from adtrain.backends.cpu.codegen.sums_over_items import SumsOverItems
from adtrain.backends.cpu.codegen.text import Writer
from adtrain.backends.cpu.forms.batchwise import is_divisible, item_count, item_kernel, item_rule, sums_items
from adtrain.codegen.expressions import pointer
from adtrain.core.kernel import CKernel, value_for
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of
from adtrain.core.types import ArrayType
from adtrain.passes.arena import Arena, aligned_to_cache_line
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.places import nbytes

ROWS_AHEAD = 4
"""Items ahead for which a gathered row is prefetched; the hardware cannot predict its address."""
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
            size = self.items * nbytes(equation.outputs[0]) // max(self.count, 1)
            return [] if source == target else [f"memcpy({target}, {source}, {size});"]
        if by_element(equation):
            body = body_of(equation)
            of = dict(zip(equation.inputs, arguments, strict=True))
            given = [*(of[v] for v in body.inputs), *results]
            rows = self.rows(body.outputs[0])
            if self.varies:
                return [f"{some_item_loops(self.writer, body)}({', '.join([*given, str(rows)])});"]
            return [f"{item_loops(self.writer, body, rows)}({', '.join(given)});"]
        fetch = self._fetch_row(equation) if equation.has(Trait.GATHER) else []
        memory = [f"team->scratch + {self.scratch}"] if self.bytes(equation, "scratch") else []
        for offsets in (self.prepared, self.collected):
            memory += [f"team->scratch + {at}" for e, at in offsets.items() if e is equation]
        types = self.types(equation)
        return [*fetch, *self.writer.call(_kernel(equation), equation, types, [*arguments, *results], memory)]

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
    most = STEP_BYTES // max(1, *(nbytes(v) // max(count, 1) for v in _by_item(body)))
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
    size = sum(map(nbytes, equation.outputs)) // max(steps, 1)
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
        arena.add(v, items * nbytes(v) // max(count, 1), i, ends[v])
    offsets = arena.offsets()
    for v in born:
        addresses[v] = f"({pointer(v)})(team->scratch + {offsets[v]})"
    for v, r in root.items():
        addresses[v] = addresses[r]
    return addresses, arena.size(offsets)
