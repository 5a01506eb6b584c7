"""Order equations so that the readers of a donated input come before the equation that overwrites it."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.program import Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.groups import producers_first
from adtrain.passes.plan_memory import pair_donated
from adtrain.passes.topological_order import TopologicalOrder


@keeps(Results.EXACT)
def readers_first(program: Program) -> Program:
    """The same equations, with readers of a donated input before its overwriter, if dependences allow."""
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    readers: dict[Variable, dict[int, None]] = {}
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            readers.setdefault(v, {})[i] = None
    order = TopologicalOrder([{producer[v] for v in e.inputs if v in producer} for e in program.equations])
    for out, donated in pair_donated(program).items():
        writer = producer.get(out)
        for i in readers.get(donated, ()):
            if writer is not None and i != writer and not order.reaches(writer, i):
                order.add_edge(i, writer)
    ordered = producers_first(range(len(order.needs)), order.needs.__getitem__)
    return replace(program, equations=tuple(program.equations[i] for i in ordered))
