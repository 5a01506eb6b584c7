"""Generates the C source of a Program: one function per equation, and an entry that runs them in one parallel region.

A barrier stands between two equations only where the second reads or writes memory that the first writes, or writes
memory that it reads. Threads that finish early continue with independent equations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from adtrain.backends.cpu.codegen.items import emit_items, sums_workspace
from adtrain.backends.cpu.codegen.loops import by_one_thread, emit_map_reduce, emit_product, team_loops
from adtrain.backends.cpu.codegen.text import Writer
from adtrain.backends.cpu.compiler import Source
from adtrain.backends.cpu.fusions import BATCHWISE, by_item, kernels
from adtrain.codegen.elementwise import pointer
from adtrain.core.kernel import value_for
from adtrain.core.primitive import Trait
from adtrain.core.program import HORIZONTAL, MAP_REDUCE, PRODUCT, Equation, Program, Variable, body_of
from adtrain.passes.fusion import by_element, elementwise
from adtrain.passes.plan_memory import MemoryPlan, Place


class Range(NamedTuple):
    """Memory from `start` to before `end`: its kind, and the bytes in the arena or the number of an argument."""

    start: tuple[str, int]
    end: tuple[str, int]


class Ranges:
    """Memory as disjoint ranges in order."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int]] = []
        self.ends: list[tuple[str, int]] = []

    def overlap(self, added: Range) -> bool:
        before_end = bisect_left(self.starts, added.end)
        return before_end > 0 and self.ends[before_end - 1] > added.start

    def add(self, added: Range) -> None:
        first, last = bisect_right(self.ends, added.start), bisect_left(self.starts, added.end)
        start, end = added
        if first < last:  # these overlap with it
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]


HEAD = """#include <omp.h>
#include <time.h>

#include "common.h"
#include "division.h"
#include "elementary.h"

typedef struct {
    char *const *io; /* inputs, constants, results, and parts of these, in this order */
    char *arena;
    int64_t failed; /* number of the first check that failed, from 1; or 0 */
} Memory;

static void fail(Memory *m, int64_t check) {
    #pragma omp critical
    if (m->failed == 0 || check < m->failed) m->failed = check;
}

static inline void fetch(const void *start, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)start + i);
}

/* The time since the last call, once all threads are here. */
static __attribute__((noinline)) void lap(const Team *team, double *seconds, double *last) {
    #pragma omp barrier
    if (team->thread == 0) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        double t = now.tv_sec + now.tv_nsec * 1e-9;
        *seconds = t - *last;
        *last = t;
    }
    #pragma omp barrier
}
"""


class Generated(NamedTuple):
    """A Program in C.

    Attributes:
        sources: the kernels that it calls.
        scratch: bytes that each thread needs.
        checked: the equations that can meet an index out of range; the entry returns the number of the first, from 1.
        kernels: what each equation calls, "loops" where all of its C is its own; nothing for a view.
        entries: the functions that run the Program, one after another. Between two of them is an exchange with other
            ranks.
    """

    text: str
    sources: frozenset[Source]
    scratch: int
    checked: list[Equation]
    kernels: list[tuple[str, ...]]
    entries: list[str]


def supported(equation: Equation) -> bool:
    """Whether there is C for an equation with its shapes."""
    if equation.form == MAP_REDUCE:
        return True
    if equation.form and not kernels(equation):
        return all(map(supported, equation.params["body"].equations))
    if equation.is_view or equation.has(Trait.COLLECTIVE) or elementwise(equation):
        return True
    types = [v.type for v in equation.inputs]
    try:
        for kernel in kernels(equation):
            value_for(kernel.numbers, *([0] if kernel.each else []), *types, **equation.kernel_params)
    except NotImplementedError:
        return False
    return bool(kernels(equation))


def workspace(equation: Equation) -> int:
    """Bytes in the arena that an equation needs for itself."""
    return sums_workspace(equation) if _emitted_as_items(equation) else 0


def _emitted_as_items(equation: Equation) -> bool:
    if equation.form == BATCHWISE:
        return True
    if equation.primitive.name in ("matmul", "reshape") or elementwise(equation):
        return False
    candidates = kernels(equation)
    return bool(candidates) and not any(k.team for k in candidates) and by_item(equation) is not None


def generate(program: Program, plan: MemoryPlan) -> Generated:
    """The source of ``program``, all of whose equations are `supported`, with its values where ``plan`` puts them."""
    writer = Writer()
    emit = _Equations(writer, program, plan)
    names, called = [], []
    for i, e in enumerate(program.equations):
        writer.called.clear()
        names.append(emit.function(i, e))
        called.append(tuple(writer.called) or ("loops",) * (names[-1] is not None))
    parts = [list[str]()]
    for i, (name, barrier) in enumerate(zip(names, barriers(program, plan), strict=True)):
        if program.equations[i].has(Trait.COLLECTIVE):
            parts.append([])
            continue
        calls = parts[-1]
        if barrier:
            calls.append("#pragma omp barrier")
        if name:
            calls.append(f"{name}(&team, &memory);")
            calls.append(f"if (seconds) lap(&team, seconds + {i}, &last);")
        else:
            calls.append(f"if (seconds && team.thread == 0) seconds[{i}] = 0;")
    scratch = -(-writer.scratch // 4096) * 4096
    entries = ["run", *(f"run_{i}" for i in range(1, len(parts)))]
    text = ["int64_t threads(void) { return omp_get_max_threads(); }"]
    for entry, calls in zip(entries, parts, strict=True):
        text += _entry(entry, calls, scratch)
    own = ['#include "own_call.h"\n'] if writer.of_user else []
    return Generated(
        "\n".join([HEAD, *own, writer.text(), "", *text, ""]),
        writer.files(),
        scratch,
        writer.checked,
        called,
        entries,
    )


def _entry(name: str, calls: Sequence[str], scratch: int) -> list[str]:
    """The lines of a function that runs equations in one parallel region."""
    return [
        "",
        "/* Runs the program; if `seconds` is not NULL it gets the time of each equation. */",
        f"int64_t {name}(char *const *io, char *arena, char *scratch, int64_t threads, double *seconds) {{",
        "    Memory memory = {io, arena, 0};",
        "    double first, last = 0;",
        "    #pragma omp parallel num_threads(threads)",
        "    {",
        "        Team team = {omp_get_thread_num(), omp_get_num_threads(), NULL};",
        f"        team.scratch = scratch + team.thread * {scratch};",
        "        if (seconds) lap(&team, &first, &last);",
        *(f"        {line}" for line in calls),
        "    }",
        "    return memory.failed;",
        "}",
    ]


@dataclass(frozen=True)
class _Equations:
    writer: Writer
    program: Program
    plan: MemoryPlan

    @cached_property
    def part_places(self) -> list[Place]:
        return self.plan.part_places

    def function(self, number: int, equation: Equation) -> str | None:
        """The name of the team function that computes an equation; None where there is nothing to compute."""
        if equation.is_view or equation.has(Trait.COLLECTIVE):
            return None
        workspace = f"(m->arena + {self.plan.workspaces[number]})"
        if by_element(equation):
            lines = self._loops(equation)
        elif equation.form == HORIZONTAL:
            lines = [line for e in equation.params["body"].equations for line in self._loops(e)]
        elif equation.form == MAP_REDUCE:
            lines = emit_map_reduce(self.writer, equation, self.place)
        elif equation.form == PRODUCT or equation.has(Trait.MATMUL):
            lines = emit_product(self.writer, equation, self.place)
        elif _emitted_as_items(equation):
            lines = emit_items(self.writer, equation, self.place, workspace)
        else:
            lines = self._kernel(equation)
        return self.writer.function(f"equation_{number}_{equation.name}", "const Team *team, Memory *m", lines)

    def place(self, v: Variable) -> str:
        """The address of a variable's elements."""
        where, at, offset = self.plan.places[v]
        if where == "arena":
            return f"(({pointer(v)})(m->arena + {at}))"
        start = {"input": 0, "constant": len(self.program.inputs)}
        start["output"] = start["constant"] + len(self.program.constants)
        if offset:
            # In io, parts follow the results.
            where, at = "output", len(self.program.outputs) + self.part_places.index(self.plan.places[v])
        return f"(({pointer(v)})m->io[{start[where] + at}])"

    def _loops(self, equation: Equation) -> list[str]:
        body = body_of(equation)
        given = ["team", *(self.place(v) for v in (*body.inputs, *body.outputs))]
        return [f"{team_loops(self.writer, body)}({', '.join(given)});"]

    def _kernel(self, equation: Equation) -> list[str]:
        candidates = kernels(equation)
        kernel = next((k for k in candidates if k.team), candidates[0])
        types = [v.type for v in equation.inputs]
        need = value_for(kernel.scratch, *types, **equation.kernel_params)
        self.writer.scratch = max(self.writer.scratch, need)
        memory = ["team->scratch"] if need and not kernel.team else []
        pointers = [self.place(v) for v in (*equation.inputs, *equation.outputs)]
        lines = self.writer.call(kernel, equation, types, pointers, memory)
        return lines if kernel.team else ["if (team->thread > 0)", "    return;", *lines]


def barriers(program: Program, plan: MemoryPlan) -> Sequence[bool]:
    """Whether a barrier precedes each equation."""
    found = []
    since = {True: _Touched(), False: _Touched()}  # by the first thread alone; by all
    for i, e in enumerate(program.equations):
        if e.has(Trait.COLLECTIVE):  # between two parallel regions
            since = {True: _Touched(), False: _Touched()}
            found.append(False)
            continue
        reads, writes = list[Range](), list[Range]()
        if not e.is_view:
            reads += [_range(v, plan) for v in e.inputs]
            writes += [_range(v, plan) for v in e.outputs]
        if workspace(e):
            writes.append(Range(("arena", plan.workspaces[i]), ("arena", plan.workspaces[i] + workspace(e))))
        alone = _alone(e)
        needed = since[False].conflicts(reads, writes) or (not alone and since[True].conflicts(reads, writes))
        if needed:
            since = {True: _Touched(), False: _Touched()}
        since[alone].add(reads, writes)
        found.append(needed)
    return found


def _alone(equation: Equation) -> bool:
    """Whether the first thread computes all of an equation."""
    if by_element(equation):
        return by_one_thread(body_of(equation))
    candidates = kernels(equation)
    return bool(candidates) and not any(k.team for k in candidates) and by_item(equation) is None


def _range(v: Variable, plan: MemoryPlan) -> Range:
    """The memory of a variable. An argument or result is one unit."""
    where, at, offset = plan.places[v]
    if where == "shared":
        return Range((where, offset), (where, offset + v.nbytes))
    return Range((where, at), (where, at + (v.nbytes if where == "arena" else 1)))


class _Touched:
    """The memory that equations read and write."""

    def __init__(self) -> None:
        self.reads, self.writes = Ranges(), Ranges()

    def add(self, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        for ranges, added in ((self.reads, reads), (self.writes, writes)):
            for each in added:
                ranges.add(each)

    def conflicts(self, reads: Sequence[Range], writes: Sequence[Range]) -> bool:
        """Whether an equation after these must wait for them."""
        return any(map(self.writes.overlap, (*reads, *writes))) or any(map(self.reads.overlap, writes))
