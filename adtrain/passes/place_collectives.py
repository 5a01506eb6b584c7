"""Place exchanges: each starts as soon as its argument is complete, and is waited for where its result is first read.

So an exchange of the gradients of the last layers runs while those of the first layers are computed (Li et al.,
"PyTorch Distributed", VLDB 2020). All ranks have the same exchanges in the same order.
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.fused import peer_exchanges_p, renamed
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import ArrayType
from adtrain.passes.groups import producers_first

exchange_done_p: Primitive = Primitive(
    "exchange_done",
    lambda received, sent: ArrayType(received.shape, received.dtype),
    lambda received, sent: received,
    flops=no_flops,
    view=True,
    traits=(Trait.RESHAPE,),
)
"""``exchange_done(received, sent)``: waits for the exchange that writes ``received``, and returns it. Until then the
memory of both is in use."""


def exchanges_data(e: Equation) -> bool:
    """Whether an equation exchanges data with other ranks."""
    return e.has(Trait.COLLECTIVE) or e.primitive is peer_exchanges_p


def place_collectives(program: Program) -> Program:
    """``program`` in another order: first the exchanges, with the equations that they need, then all others.

    `exchange_done` stands before the first reader of an exchange's result, and before a `peer_exchanges` equation: its
    blocks take multiprocessors until the peers' blocks run, which might wait for the exchange. Applied after all other
    passes.
    """
    exchanges = [i for i, e in enumerate(program.equations) if exchanges_data(e)]
    if not exchanges:
        return program
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    needs = [{producer[v] for v in e.inputs if v in producer} for e in program.equations]
    order = producers_first([*exchanges, *range(len(needs))], needs.__getitem__)
    done: dict[Variable, Variable] = {}
    pending: dict[Variable, Equation] = {}
    equations: list[Equation] = []

    def wait(read: tuple[Variable, ...]) -> None:
        for v in read:
            if v in pending:
                e = pending.pop(v)
                done[v] = Variable(v.type, v.device)
                inputs = (v, *(done.get(x, x) for x in e.inputs))
                equations.append(Equation(exchange_done_p, inputs, {}, (done[v],), e.scope, e.phase))

    for i in order:
        e = program.equations[i]
        wait(tuple(pending) if e.primitive is peer_exchanges_p else e.inputs)
        e = renamed(e, done)
        equations.append(e)
        if e.has(Trait.COLLECTIVE):
            pending[e.outputs[0]] = e
    wait(program.outputs)
    return replace(program, equations=tuple(equations), outputs=tuple(done.get(v, v) for v in program.outputs))
