"""Blocks: small equations in one thread block, with barriers between those that depend on one another.

What they hand to one another stays in shared memory while it fits, else in the equation's scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from adtrain.backends.cuda.codegen.block_forms import Step, form_of, is_checked
from adtrain.backends.cuda.codegen.part import Part, aligned, divided, indented
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import body_of
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Program, Variable
from adtrain.lowering.cpu.shapes import contiguous
from adtrain.passes.arena import Arena
from adtrain.passes.fuse_blocks import renamed
from adtrain.passes.plan_memory import nbytes

WARP = 32
MOST_THREADS = 1024
WORD = 4
"""Bytes of the shortest element that can be copied to shared memory without waiting."""
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

    @property
    def on_its_way(self) -> bool:
        """Whether the result is only there after the next barrier."""
        return any(not step.waits for step in self.steps)


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
    body, names = _with_results(body, names, threads)
    own, timed, known = _with_copies(body, names, threads)
    places, shared, scratch = _memory(own, timed)
    if not all(places[t.equation.outputs[0]][0] == "shared_bytes" for t in timed if t.on_its_way):
        timed, known = _timed(body, names, threads), names  # there is no room for copies
        places, shared, scratch = _memory(body, timed)
    lines = []
    for v, (memory, at) in places.items():
        if isinstance(v, Variable):
            c = c_type(v.type.dtype)
            lines.append(f"{c} *const {known[v]} = ({c} *)({memory} + {at});")
    lines += _statements(timed, places, threads)
    checked = any(map(is_checked, body.equations))
    return Part(
        lines, body.inputs, body.outputs, ("common/block_ops.cuh",), shared=shared, scratch=scratch, checked=checked
    )


def _with_results(body: Program, names: dict[Variable, str], threads: int) -> tuple[Program, dict[Variable, str]]:
    """The body and the pointers, where small results that are read again are handed on in shared memory, and stored
    from there: device memory is further away."""
    read = {v for e in body.equations if e.primitive.name != "reshape" for v in e.inputs}
    made = {v for e in body.equations if e.primitive.name != "reshape" for v in e.outputs}
    handed = {v: Variable(v.type, v.device) for v in body.outputs if v in read & made and v.size <= threads}
    equations = []
    for e in body.equations:
        equations.append(renamed(e, handed))
        for v in (v for v in e.outputs if v in handed):
            equations.append(Equation(PRIMITIVES["broadcast_to"], (handed[v],), {"shape": v.type.shape}, (v,)))
    names = names | {w: f"h{i}" for i, w in enumerate(handed.values())}
    for e in equations:
        if e.primitive.name == "reshape":
            names[e.outputs[0]] = names[e.inputs[0]]
    return replace(body, equations=tuple(equations)), names


def _with_copies(
    body: Program, names: dict[Variable, str], threads: int
) -> tuple[Program, list[_Timed], dict[Variable, str]]:
    """The body, its equations and the pointers, where small inputs that are first read behind a barrier are copied to
    shared memory: so they arrive while the first equations run."""
    first: dict[Variable, int] = {}
    for e, begin, _ in _timed(body, names, threads):
        if e.primitive.name != "reshape":
            first |= {v: min(begin, first.get(v, begin)) for v in e.inputs}
    late = [v for v in body.inputs if first.get(v, 0) > 0 and _can_copy(v, v.size, threads)]
    copies = {v: Variable(v.type, v.device) for v in late}
    names = names | {w: f"e{i}" for i, w in enumerate(copies.values())}
    equations = tuple(renamed(e, copies) for e in body.equations)
    own = replace(body, inputs=(*body.inputs, *copies.values()), equations=equations)
    timed = []
    for found in _timed(own, names, threads):
        e = found.equation
        timed.append(_copied(e.inputs[0], e.outputs[0], names) if _is_copy(e, body, threads) else found)
    return own, [*(_copied(v, w, names) for v, w in copies.items()), *timed], names


def _is_copy(equation: Equation, body: Program, threads: int) -> bool:
    """Whether it broadcasts an input into shared memory, and no more."""
    if equation.primitive.name != "broadcast_to":
        return False
    (x,), (y,) = equation.inputs, equation.outputs
    return x in body.inputs and y not in body.outputs and _can_copy(x, y.size, threads)


def _can_copy(v: Variable, size: int, threads: int) -> bool:
    """Whether so many elements of an input can be on their way to shared memory while the threads do something else."""
    return 0 < size <= threads and v.type.dtype.itemsize >= WORD


def _copied(v: Variable, to: Variable, names: dict[Variable, str]) -> _Timed:
    """An input, broadcast where `to` is larger, on its way to shared memory, which it reaches by the first barrier."""
    axes = range(len(to.type.shape) - len(v.type.shape), len(to.type.shape))
    steps = [step if n > 1 else 0 for step, n in zip(contiguous(v.type.shape), v.type.shape, strict=True)]
    place = divided("threadIdx.x", to.type.shape, [0] * axes.start + steps)
    copy = f"cp_async<{v.type.dtype.itemsize}>({names[to]} + threadIdx.x, {names[v]} + {place}, true);"
    equation = Equation(PRIMITIVES["broadcast_to"], (v,), {"shape": to.type.shape}, (to,))
    return _Timed(equation, 0, [Step([f"if (threadIdx.x < {to.size})", f"    {copy}"], 0, waits=False)])


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
    copied = [t.equation.outputs[0] for t in timed if t.on_its_way]
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
    for v in sorted(made, key=lambda v: v in copied):  # copies get what is left
        wanted.append((v, nbytes(v), made[v], max(made[v], until.get(v, made[v]))))
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
        if time == 1 and any(t.on_its_way for t in timed):
            yield from ("cp_async_commit_group();", "cp_async_wait_group<0>();")
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
