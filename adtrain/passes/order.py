"""Regions, and orders of equations.

A region is a part of a Program between exchanges and fusion barriers, which is optimised alone. Its kernels depend on
its own equations only. So equations that are a region of several Programs, such as the gradient of one shard of a
batch, have the same kernels in all of them, and give the same bits.

Exchanges start early: as soon as the argument is complete, and they are waited for where the result is first read. So
an exchange of the gradients of the last layers runs while those of the first layers are computed (Li et al., "PyTorch
Distributed", VLDB 2020). All ranks have the same exchanges in the same order.

Readers of a donated input come before its overwriter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from adtrain.core.array import Array
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.program import Equation, Program, Variable, arguments_of, renamed, single_equations
from adtrain.core.staging import Pass, Results, keeps
from adtrain.core.types import ArrayType
from adtrain.passes.groups import TopologicalOrder, producers_first
from adtrain.passes.plan_memory import pair_donated


@keeps(Results.FINITE)
def optimize_regions(program: Program, passes: Sequence[Pass]) -> Program:
    """``program`` after ``passes`` on each region. Exchanges stay in their order; barriers are removed."""
    names: dict[Variable, Variable] = {}
    constants: dict[Variable, Array] = {}
    equations: list[Equation] = []
    parts = list(regions(program))
    last_reader = {v: i for i, part in enumerate(parts) for e in part for v in e.inputs}
    last_reader |= dict.fromkeys(program.outputs, len(parts))
    for i, part in enumerate(parts):
        part = [renamed(e, names) for e in part]
        first = part[0]
        if first.has(Trait.BARRIER):
            names |= zip(first.outputs, first.inputs, strict=True)
        elif first.has(Trait.COLLECTIVE):
            equations.append(first)
        else:
            known = {**program.constants, **constants}
            before = _region(part, known, [v for e in part for v in e.outputs if last_reader.get(v, -1) > i])
            after = before
            for apply in passes:
                after = apply(after)
            equations += after.equations
            constants |= after.constants
            names |= {old: new for old, new in zip(before.outputs, after.outputs, strict=True) if old is not new}
    outputs = tuple(names.get(v, v) for v in program.outputs)
    used = {v for e in equations for v in e.inputs} | set(outputs)
    kept = {v: x for v, x in {**program.constants, **constants}.items() if v in used}
    return replace(program, constants=kept, equations=tuple(equations), outputs=outputs)


def regions(program: Program) -> Iterator[list[Equation]]:
    """The equations in groups: each region is one, and so is each exchange or barrier between regions."""
    found: list[Equation] = []
    for e in program.equations:
        if not (e.has(Trait.BARRIER) or e.has(Trait.COLLECTIVE)):
            found.append(e)
            continue
        if found:
            yield found
        yield [e]
        found = []
    if found:
        yield found


def _region(part: Sequence[Equation], constants: dict[Variable, Array], outputs: Sequence[Variable]) -> Program:
    """The equations as a Program of their own."""
    read = arguments_of(part)
    own = {v: constants[v] for v in read if v in constants}
    return Program(tuple(v for v in read if v not in own), own, tuple(part), tuple(outputs))


exchange_done_p: Primitive = Primitive(
    "exchange_done",
    lambda received, sent: ArrayType(received.shape, received.dtype),
    lambda received, sent: received,
    flops=no_flops,
    view=True,
    traits=(Trait.RESHAPE,),
    axes=lambda received, sent: f"*,{'.' * sent.ndim}->*",
)
"""``exchange_done(received, sent)``: waits for the exchange that writes ``received``, and returns it. Until then the
memory of both is in use."""


def exchanges_data(e: Equation) -> bool:
    """Whether an equation exchanges data with other ranks."""
    return any(x.has(Trait.COLLECTIVE) for x in single_equations(e))


@keeps(Results.EXACT)
def place_collectives(program: Program, early_updates: bool = False) -> Program:
    """``program`` in another order: first the exchanges, with the equations that they need, then all others.

    With ``early_updates`` the optimizer's update of a bucket, and the all-gather of its parameters, follow both the
    last reader of the old parameters and the gradients of the next bucket. So both exchanges run beside the backward
    pass.

    `exchange_done` stands before the first reader of an exchange's result, and before a fused equation that exchanges
    data: it uses the processor until the peers' kernels run, which might wait for the exchange. Applied after all other
    passes.
    """
    exchanges = [i for i, e in enumerate(program.equations) if exchanges_data(e)]
    if not exchanges:
        return program
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    needs = [{producer[v] for v in e.inputs if v in producer} for e in program.equations]
    dependences = TopologicalOrder(needs)
    if early_updates:
        exchanges = _with_early_updates(program, exchanges, dependences)
    order = producers_first([*exchanges, *range(len(needs))], dependences.needs.__getitem__)
    done: dict[Variable, Variable] = {}
    pending: dict[Variable, Equation] = {}
    equations: list[Equation] = []

    def wait(read: tuple[Variable, ...]) -> None:
        for v in read:
            if v in pending:
                e = pending.pop(v)
                done[v] = v.like()
                inputs = (v, *(done.get(x, x) for x in e.inputs))
                equations.append(Equation(exchange_done_p, inputs, {}, (done[v],), e.scope, e.phase))

    for i in order:
        e = program.equations[i]
        wait(tuple(pending) if e.form and exchanges_data(e) else e.inputs)
        e = renamed(e, done)
        equations.append(e)
        if e.has(Trait.COLLECTIVE):
            pending[e.outputs[0]] = e
    wait(program.outputs)
    return replace(program, equations=tuple(equations), outputs=tuple(done.get(v, v) for v in program.outputs))


def _with_early_updates(program: Program, exchanges: Sequence[int], dependences: TopologicalOrder) -> list[int]:
    """The exchanges in a new order: an all-gather of parameters precedes the second all-to-all that it does not need.

    So the gradients of the next bucket are computed while the all-to-all of this one runs. Where only one more
    all-to-all follows, the all-gather precedes it, and runs while these gradients are computed. Adds dependences: such
    an all-gather follows all readers of the old parameters.
    """
    source: dict[Variable, Variable] = {}  # for each view, the value whose memory it shares
    for e in program.equations:
        if e.is_view:
            source[e.outputs[0]] = source.get(e.inputs[0], e.inputs[0])
    old = {source.get(new, new): donated for new, donated in pair_donated(program).items()}
    gathers = {i: old[v] for i in exchanges if (v := program.equations[i].outputs[0]) in old}
    found = [i for i in exchanges if i not in gathers]
    for i, parameters in gathers.items():
        needed = max((k for k, x in enumerate(found) if dependences.reaches(x, i)), default=-1)
        names = [program.equations[x].primitive.name for x in found]
        others = [k for k, name in enumerate(names) if name == "all_to_all" and k > needed]
        found.insert(others[:2][-1] if others else len(found), i)  # before the second one, or the only one
        for reader, e in enumerate(program.equations):
            reads = any(source.get(v, v) is parameters for v in e.inputs)
            if reads and reader != i and not dependences.reaches(i, reader):
                dependences.add_edge(reader, i)
    return found


@keeps(Results.EXACT)
def readers_first(program: Program) -> Program:
    """The same equations, with readers of a donated input before its overwriter, if dependences allow."""
    producer = program.positions
    readers: dict[Variable, dict[int, None]] = {}
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            readers.setdefault(v, {})[i] = None
    order = TopologicalOrder(program.needs)
    for out, donated in pair_donated(program).items():
        writer = producer.get(out)
        for i in readers.get(donated, ()):
            if writer is not None and i != writer and not order.reaches(writer, i):
                order.add_edge(i, writer)
    ordered = producers_first(range(len(order.needs)), order.needs.__getitem__)
    return replace(program, equations=tuple(program.equations[i] for i in ordered))
