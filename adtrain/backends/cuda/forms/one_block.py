"""One-block fusion: small equations that depend on one another run in one thread block, without launches in between.

Examples: the sum of the loss, the count of correct answers, schedules, the optimizer's scalars, the gradients of small
biases and their updates.

Barriers stand between dependent equations. Values between equations stay in shared memory while they fit, otherwise in
the equation's scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from adtrain.backends.cuda.codegen.block_rules import RULES, is_checked, rule_of
from adtrain.backends.cuda.codegen.part import (
    Kernel,
    Part,
    Step,
    StepRule,
    aligned_to_vector,
    indented,
    kernel,
    part_names,
)
from adtrain.backends.cuda.forms import Form, define
from adtrain.codegen.elementwise import access, c_type
from adtrain.core.kernel import WARP, Target
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable, body_of, renamed
from adtrain.passes.fusion import Fusion, by_element
from adtrain.passes.groups import MAX_EQUATIONS, Groups
from adtrain.passes.plan_memory import Arena

ONE_BLOCK = "one_block"
"""Small equations that one thread block of a GPU computes in order (a one-block megakernel)."""

IN_ONE_BLOCK = frozenset(RULES) - {"standardize"}
"""The primitives, besides elementwise ones and reshapes, that may be a part of such a kernel."""

MAX_STEPS = 8 << 10
"""Maximum steps of a small equation: elements that are visited one after another. On an H200 a launch costs about 2 us,
as much as 8 elements for each of 1024 threads if the threads wait for every element."""
LOADS_IN_FLIGHT, SUMS_AT_ONCE = 4, 4
"""Elements of a sum that a thread loads at once: of one sum, or of neighbouring sums."""


class OneBlockFusion(Fusion):
    """Each connected group of small equations between the same large ones.

    A small equation that reads the reshape of a small one's result computes the reshape itself.
    """

    form = ONE_BLOCK
    limit = MAX_EQUATIONS

    def copied(self, producer: Equation, reader: Equation) -> bool:
        return is_small(reader) and self._is_between(producer, reader)

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        both = groups.equations[producer], groups.equations[reader]
        return len({self.depths[e] for e in both}) == 1 and all(map(self._is_member, both))

    def _is_member(self, e: Equation) -> bool:
        return is_small(e) or any(self.copied(e, reader) for reader in self.program.readers.get(e.outputs[0], ()))

    def _is_between(self, view: Equation, reader: Equation) -> bool:
        """Whether an equation is a reshape of a small equation's result, at the depth of a reader."""
        source = self.program.producer.get(view.inputs[0]) if view.has(Trait.RESHAPE) else None
        return source is not None and is_small(source) and self.depths[source] == self.depths[reader]

    @cached_property
    def depths(self) -> Mapping[Equation, int]:
        """For each equation the minimum number of launches before it. Small and `one_block` equations do not count."""
        after: dict[Variable, int] = {}
        found = {}
        for e in self.program.equations:
            found[e] = max((after.get(v, 0) for v in e.inputs), default=0)
            launch = not (is_small(e) or e.has(Trait.RESHAPE) or e.form == ONE_BLOCK)
            after |= dict.fromkeys(e.outputs, found[e] + launch)
        return found


def is_small(equation: Equation) -> bool:
    """Whether one thread block computes it in less time than a launch takes."""
    e = equation
    if not by_element(e) and e.primitive.name not in IN_ONE_BLOCK:
        return False
    if not all(v.size for v in (*e.inputs, *e.outputs)):
        return False
    return _steps(e) <= MAX_STEPS


def _steps(equation: Equation) -> int:
    """The number of elements that are visited one after another."""
    e = equation
    size, shape = e.inputs[0].size if e.inputs else 0, e.inputs[0].type.shape if e.inputs else ()
    if e.has(Trait.REDUCTION):
        last = max((i for i, n in enumerate(shape) if n > 1), default=0)
        return size // LOADS_IN_FLIGHT // (1 if last in e.params["axes"] else SUMS_AT_ONCE)
    if e.primitive.name == "argmax":
        return size
    if e.primitive.name == "scatter_along_axis":
        return e.outputs[0].size * shape[e.params["axis"]]
    return e.outputs[0].size


MAX_THREADS = 1024
WORD, VECTOR = 4, 16
"""Bytes of the smallest and the largest cp.async copy."""
SHARED = 40 << 10
"""Bytes of dynamic shared memory for values. With the static memory of reductions it stays below 48 KiB."""

Places: TypeAlias = "dict[Variable | int, tuple[str, int]]"
"""The memory and the byte in it of a value, or of the partial results of scheduled equation i."""


class _Scheduled(NamedTuple):
    """An equation whose steps run in phases `begin`, `begin` + 1, ... A barrier separates phases."""

    equation: Equation
    begin: int
    steps: Sequence[Step]

    @property
    def end(self) -> int:
        return self.begin + len(self.steps)

    def step(self, phase: int) -> Step | None:
        """The step that runs in a phase."""
        return self.steps[phase - self.begin] if self.begin <= phase < self.end else None

    @property
    def asynchronous(self) -> bool:
        """Whether the result is an asynchronous copy, complete after the next barrier."""
        return any(not step.waits for step in self.steps)


def threads_for(equation: Equation) -> int:
    """Threads of a block with a launch of its own: no more than have work."""
    body = body_of(equation)
    most = max(step.threads for timed in _schedule(body, names_of(body), MAX_THREADS) for step in timed.steps)
    return min(MAX_THREADS, -(-most // WARP) * WARP)


def one_block(equation: Equation, threads: int) -> Part:
    """The part for a `one_block` equation, or for a single small one, with at most SHARED bytes of shared memory."""
    body = body_of(equation)
    return part_of(body, names_of(body), threads)


def part_of(
    body: Program,
    names: dict[Variable, str],
    threads: int,
    shared_limit: int = SHARED,
    copied: int = 0,
    larger: Collection[Variable] = (),
    forms: Callable[[Equation], StepRule] = rule_of,
    in_shared: Collection[Variable] = (),
    in_place: Mapping[Variable, Variable] = MappingProxyType({}),
    beside: Sequence[Sequence[str]] = (),
) -> Part:
    """The part for the equations of a body; ``names`` are the pointers to its values.

    Args:
        shared_limit: bytes of dynamic shared memory for values.
        copied: maximum elements of a result that stays in shared memory too, if later equations read it; at least one
            for each thread.
        larger: inputs of whole 16-byte vectors that are copied to shared memory if they are first read after a barrier,
            although they have more elements than there are threads.
        forms: how the block computes each equation.
        in_shared: inputs in shared memory, which are not copied there.
        in_place: for a value between equations the output in whose memory it lies. It is read once, by the elementwise
            equation that computes the output.
        beside: statements of other work of the block, for each of the first phases. A barrier separates phases.
    """
    names = names | {v: names[output] for v, output in in_place.items()}
    operands = body.inputs, body.outputs
    body, names = _with_results(body, names, max(copied, threads))
    own, timed, known = _with_copies(body, names, threads, forms, larger, in_shared)
    own = replace(own, outputs=(*own.outputs, *in_place))
    places, shared, scratch = _memory(own, timed, shared_limit)
    if not all(places[t.equation.outputs[0]][0] == "shared_bytes" for t in timed if t.asynchronous):
        timed, known = _schedule(body, names, threads, forms), names  # the copies do not fit
        places, shared, scratch = _memory(replace(body, outputs=own.outputs), timed, shared_limit)
    lines = []
    for v, (memory, at) in places.items():
        if isinstance(v, Variable):
            c = c_type(v.type.dtype)
            lines.append(f"{c} *const {known[v]} = ({c} *)({memory} + {at});")
    lines += _statements(timed, places, threads, beside)
    checked = any(map(is_checked, body.equations))
    return Part(lines, *operands, ("common/block_ops.cuh",), shared=shared, scratch=scratch, checked=checked)


def _with_results(body: Program, names: dict[Variable, str], most: int) -> tuple[Program, dict[Variable, str]]:
    """The body and the pointers, with a copy in shared memory of each result of at most ``most`` elements that later
    equations read, and with an equation that writes each result that is a reshape."""
    read = {v for e in body.equations if not e.has(Trait.RESHAPE) for v in e.inputs}
    made = {v for e in body.equations if not e.has(Trait.RESHAPE) for v in e.outputs}
    shared_copies = {v: Variable(v.type, v.device) for v in body.outputs if v in read & made and v.size <= most}
    names = names | {w: f"h{i}" for i, w in enumerate(shared_copies.values())}
    reshaped: dict[Variable, Variable] = {}  # for a result that is a reshape, its elements in the shape of the argument
    equations = []
    for e in body.equations:
        equations.append(renamed(e, shared_copies))
        if e.has(Trait.RESHAPE):
            (x,), (y,) = equations[-1].inputs, e.outputs
            if y in body.outputs:
                reshaped[y] = Variable(x.type, x.device)
                names[reshaped[y]] = names[y]
                equations.append(_copy(x, reshaped[y]))
            names[y] = names[x]
        equations += [_copy(shared_copies[v], v) for v in e.outputs if v in shared_copies]
    outputs = tuple(reshaped.get(v, v) for v in body.outputs)
    return replace(body, equations=tuple(equations), outputs=outputs), names


def _copy(x: Variable, to: Variable) -> Equation:
    return Equation(PRIMITIVES["broadcast_to"], (x,), {"shape": to.type.shape}, (to,))


def _with_copies(
    body: Program,
    names: dict[Variable, str],
    threads: int,
    forms: Callable[[Equation], StepRule],
    larger: Collection[Variable] = (),
    in_shared: Collection[Variable] = (),
) -> tuple[Program, list[_Scheduled], dict[Variable, str]]:
    """The body, its schedule and the pointers, with inputs that are first read after a barrier prefetched into shared
    memory, if they are small or among ``larger``."""
    first: dict[Variable, int] = {}
    for e, begin, _ in _schedule(body, names, threads, forms):
        if not e.has(Trait.RESHAPE):
            first |= {v: min(begin, first.get(v, begin)) for v in e.inputs}
    in_global = [v for v in body.inputs if v not in in_shared]
    late = [v for v in in_global if first.get(v, 0) > 0 and (v in larger or _can_copy(v, v.size, threads))]
    copies = {v: Variable(v.type, v.device) for v in late}
    names = names | {w: f"e{i}" for i, w in enumerate(copies.values())}
    equations = tuple(renamed(e, copies) for e in body.equations)
    own = replace(body, inputs=(*body.inputs, *copies.values()), equations=equations)
    timed = []
    for found in _schedule(own, names, threads, forms):
        e = found.equation
        timed.append(
            _copied(e.inputs[0], e.outputs[0], names) if _is_copy(e, in_global, body.outputs, threads) else found
        )
    first_copies = (_copied_whole(v, w, names) if v in larger else _copied(v, w, names) for v, w in copies.items())
    return own, [*first_copies, *timed], names


def _is_copy(equation: Equation, inputs: Collection[Variable], outputs: Collection[Variable], threads: int) -> bool:
    """Whether it only broadcasts an input into shared memory."""
    if equation.primitive.name != "broadcast_to":
        return False
    (x,), (y,) = equation.inputs, equation.outputs
    return x in inputs and y not in outputs and _can_copy(x, y.size, threads)


def _can_copy(v: Variable, size: int, threads: int) -> bool:
    """Whether `size` elements of an input can be copied to shared memory asynchronously, one for each thread."""
    return 0 < size <= threads and v.type.dtype.itemsize >= WORD


def _copied(v: Variable, to: Variable, names: dict[Variable, str]) -> _Scheduled:
    """The asynchronous copy of an input to shared memory, broadcast to the shape of `to`."""
    place = access(v.type.shape, to.type.shape, ("threadIdx.x", len(to.type.shape))).place
    copy = f"cp_async<{v.type.dtype.itemsize}>({names[to]} + threadIdx.x, {names[v]} + {place}, true);"
    return _Scheduled(_copy(v, to), 0, [Step([f"if (threadIdx.x < {to.size})", f"    {copy}"], 0, waits=False)])


def _copied_whole(v: Variable, to: Variable, names: dict[Variable, str]) -> _Scheduled:
    """The asynchronous copy of an input of whole 16-byte vectors to shared memory."""
    wide = VECTOR // v.type.dtype.itemsize
    copy = f"cp_async<{VECTOR}>({names[to]} + i * {wide}, {names[v]} + i * {wide}, true);"
    lines = [f"for (int i = threadIdx.x; i < {v.size // wide}; i += THREADS)", f"    {copy}"]
    return _Scheduled(_copy(v, to), 0, [Step(lines, 0, waits=False)])


def names_of(body: Program) -> dict[Variable, str]:
    """The pointers: x for inputs, y for outputs, s for values between. A reshape between has that of its argument."""
    names = part_names(body.inputs, body.outputs)
    for e in body.equations:
        for v in e.outputs:
            names.setdefault(v, names[e.inputs[0]] if e.has(Trait.RESHAPE) else f"s{len(names)}")
    return names


def _schedule(
    body: Program, names: dict[Variable, str], threads: int, forms: Callable[[Equation], StepRule] = rule_of
) -> list[_Scheduled]:
    """Each equation in the first phase in which its inputs are complete."""
    ready: dict[Variable, int] = dict.fromkeys(body.inputs, 0)
    found = []
    for e in body.equations:
        begin = max((ready[v] for v in e.inputs), default=0)
        steps = () if e.has(Trait.RESHAPE) else forms(e)(e, names, threads)
        found.append(_Scheduled(e, begin, steps))
        ready |= dict.fromkeys(e.outputs, found[-1].end)
    return found


def _memory(body: Program, timed: Sequence[_Scheduled], limit: int) -> tuple[Places, int, int]:
    """Where values between equations lie ("shared_bytes" or "own"), and the bytes of both memories.

    Args:
        limit: bytes of shared memory.
    """
    root: dict[Variable, Variable] = {}
    made: dict[Variable, int] = {}
    copied = [t.equation.outputs[0] for t in timed if t.asynchronous]
    until: dict[Variable, int] = {}
    wanted: list[tuple[Variable | int, int, int, int]] = []
    for i, (e, begin, steps) in enumerate(timed):
        end = begin + len(steps) - 1
        until |= {root.get(v, v): max(until.get(root.get(v, v), 0), end) for v in e.inputs}
        wanted += [(i, step.partial, begin + k, begin + k + 1) for k, step in enumerate(steps) if step.partial]
        if e.has(Trait.RESHAPE):
            root[e.outputs[0]] = root.get(e.inputs[0], e.inputs[0])
        else:
            made |= {v: end for v in e.outputs if v not in body.outputs}
    for v in sorted(made, key=lambda v: v in copied):  # copies last, into the rest
        wanted.append((v, v.nbytes, made[v], max(made[v], until.get(v, made[v]))))
    shared, own = Arena(), Arena()
    for key, size, start, end in wanted:
        shared.add(key, size, start, end)
    if shared.size(shared.offsets()) > limit:  # not all fit: try one after another
        requests, shared.requests = shared.requests, []
        for request in requests:
            shared.requests.append(request)
            if shared.size(shared.offsets()) > limit:
                own.requests.append(shared.requests.pop())
    in_shared, in_own = shared.offsets(), own.offsets()
    places: Places = {key: ("shared_bytes", at) for key, at in in_shared.items()}
    places |= {key: ("own", at) for key, at in in_own.items()}
    return places, aligned_to_vector(shared.size(in_shared)), aligned_to_vector(own.size(in_own))


def _statements(
    timed: Sequence[_Scheduled], places: Places, threads: int, beside: Sequence[Sequence[str]]
) -> Iterator[str]:
    phases = max([len(beside), *(t.end for t in timed)])
    steps = [[(i, step) for i, t in enumerate(timed) if (step := t.step(phase))] for phase in range(phases + 1)]
    at = _first_threads(steps, threads)
    for scheduled in timed:
        for step in scheduled.steps:
            yield from step.declared
    for phase in range(phases):
        if phase == 1 and any(t.asynchronous for t in timed):
            yield from ("cp_async_commit_group();", "cp_async_wait_group<0>();")
        if phase:
            yield "__syncthreads();"
        yield from beside[phase] if phase < len(beside) else ()
        for i, step in steps[phase + 1]:
            if step.early:
                yield from ("{", at[i, phase + 1], *indented(step.early), "}")
        for i, step in steps[phase]:
            if step.loads:
                yield from ("{", at[i, phase], *indented(step.loads), "}")
        for i, step in sorted(steps[phase], key=lambda found: bool(found[1].loads)):  # those last that wait for loads
            yield "{"
            yield at[i, phase]
            if i in places:
                yield "    char *const partial = (char *){} + {};".format(*places[i])
            if not phase:
                yield from indented(step.early)
            yield from indented(step.lines)
            yield "}"


def _first_threads(steps: Sequence[Sequence[tuple[int, Step]]], threads: int) -> dict[tuple[int, int], str]:
    """The definition of `t` by equation and phase, for the steps of each phase with the numbers of their equations. In
    a phase each equation starts at the warp after the previous one's last warp."""
    found = {}
    for phase, of_phase in enumerate(steps):
        taken = 0
        for i, step in of_phase:
            rotated = f"(threadIdx.x + {threads - taken}) % THREADS" if taken else "threadIdx.x"
            found[i, phase] = f"    const int t = {rotated};"
            taken = (taken + -(-step.threads // WARP) * WARP) % threads
    return found


def _kernels(equation: Equation, target: Target) -> list[Kernel]:
    threads = threads_for(equation)
    return [kernel("one_block", [one_block(equation, threads)], threads)]


define(Form(ONE_BLOCK, _kernels))
