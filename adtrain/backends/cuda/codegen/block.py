"""Blocks: small equations in one thread block, with barriers between those that depend on one another.

What they hand to one another stays in shared memory while it fits, else in the equation's scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from adtrain.backends.cuda.codegen.block_forms import Step, form_of, is_checked
from adtrain.backends.cuda.codegen.part import Part, aligned, indented
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import body_of
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.arena import Arena
from adtrain.passes.plan_memory import nbytes

WARP = 32
MOST_THREADS = 1024
SHARED = 40 << 10
"""Bytes of shared memory for values: with what a reduction has of its own, within the 48 KiB of every kernel."""

Places: TypeAlias = "dict[Variable | int, tuple[str, int]]"
"""Where a value, or the partial results of timed equation i, lies: the memory and the byte in it."""


class _Timed(NamedTuple):
    """An equation whose steps run at `begin`, `begin` + 1, ...; those of one time run side by side."""

    equation: Equation
    begin: int
    steps: Sequence[Step]

    @property
    def end(self) -> int:
        return self.begin + len(self.steps)


def threads_for(equation: Equation) -> int:
    """Threads of a block that has a launch of its own: no more than its equations find work for."""
    body = body_of(equation)
    most = max(step.threads for timed in _timed(body, names_of(body), MOST_THREADS) for step in timed.steps)
    return min(MOST_THREADS, -(-most // WARP) * WARP)


def block(equation: Equation, threads: int) -> Part:
    """What a thread block does for a `block` equation, or for a single small one."""
    body = body_of(equation)
    return part_of(body, names_of(body), threads)


def part_of(body: Program, names: dict[Variable, str], threads: int) -> Part:
    """What a thread block does for the equations of a body, with these pointers to its values."""
    timed = _timed(body, names, threads)
    places, shared, scratch = _memory(body, timed)
    lines = []
    for v, (memory, at) in places.items():
        if isinstance(v, Variable):
            c = c_type(v.type.dtype)
            lines.append(f"{c} *const {names[v]} = ({c} *)({memory} + {at});")
    lines += _statements(timed, places, threads)
    checked = any(map(is_checked, body.equations))
    return Part(lines, body.inputs, body.outputs, ("block.cuh",), shared=shared, scratch=scratch, checked=checked)


def names_of(body: Program) -> dict[Variable, str]:
    """The pointers: x of inputs, y of outputs, s of what is handed on; a reshape has its argument's."""
    names = {v: f"x{i}" for i, v in enumerate(body.inputs)} | {v: f"y{i}" for i, v in enumerate(body.outputs)}
    for e in body.equations:
        for v in e.outputs:
            if e.primitive.name == "reshape":
                names[v] = names[e.inputs[0]]
            else:
                names.setdefault(v, f"s{len(names)}")
    return names


def _timed(body: Program, names: dict[Variable, str], threads: int) -> list[_Timed]:
    """Each equation as soon as what it reads is there."""
    ready: dict[Variable, int] = dict.fromkeys(body.inputs, 0)
    found = []
    for e in body.equations:
        begin = max((ready[v] for v in e.inputs), default=0)
        steps = () if e.primitive.name == "reshape" else form_of(e)(e, names, threads)
        found.append(_Timed(e, begin, steps))
        ready |= dict.fromkeys(e.outputs, found[-1].end)
    return found


def _memory(body: Program, timed: Sequence[_Timed]) -> tuple[Places, int, int]:
    """Where what is handed on lies ("shared_bytes" or "own"), and the bytes of either memory."""
    root: dict[Variable, Variable] = {}
    made: dict[Variable, int] = {}
    until: dict[Variable, int] = {}
    wanted: list[tuple[Variable | int, int, int, int]] = []
    for i, (e, begin, steps) in enumerate(timed):
        end = begin + len(steps) - 1
        until |= {root.get(v, v): max(until.get(root.get(v, v), 0), end) for v in e.inputs}
        wanted += [(i, step.partial, begin + k, begin + k + 1) for k, step in enumerate(steps) if step.partial]
        if e.primitive.name == "reshape":
            root[e.outputs[0]] = root.get(e.inputs[0], e.inputs[0])
        else:
            made |= {v: end for v in e.outputs if v not in body.outputs}
    wanted += [(v, nbytes(v), start, max(start, until.get(v, start))) for v, start in made.items()]
    shared, own = Arena(), Arena()
    for key, size, start, end in wanted:
        shared.add(key, size, start, end)
        if shared.size(shared.offsets()) > SHARED:
            own.requests.append(shared.requests.pop())
    in_shared, in_own = shared.offsets(), own.offsets()
    places: Places = {key: ("shared_bytes", at) for key, at in in_shared.items()}
    places |= {key: ("own", at) for key, at in in_own.items()}
    return places, aligned(shared.size(in_shared)), aligned(own.size(in_own))


def _statements(timed: Sequence[_Timed], places: Places, threads: int) -> Iterator[str]:
    for time in range(max(t.end for t in timed)):
        if time:
            yield "__syncthreads();"
        taken = 0
        for i, (_, begin, steps) in enumerate(timed):
            if not begin <= time < begin + len(steps):
                continue
            step = steps[time - begin]
            yield "{"
            # Small equations side by side: each begins with the warp after the one before it.
            turned = f"(threadIdx.x + {threads - taken}) % THREADS" if taken else "threadIdx.x"
            yield f"    const int t = {turned};"
            if i in places:
                yield "    char *const partial = (char *){} + {};".format(*places[i])
            yield from indented(step.lines)
            yield "}"
            taken = (taken + -(-step.threads // WARP) * WARP) % threads
