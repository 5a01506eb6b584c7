"""Order equations so that the readers of a donated input come before the equation that overwrites it."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.program import Program
from adtrain.passes.groups import producers_first
from adtrain.passes.plan_memory import pair_donated


def readers_first(program: Program) -> Program:
    """The same equations, with readers of a donated input before its overwriter, if dependences allow."""
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    needs = [{producer[v] for v in e.inputs if v in producer} for e in program.equations]
    for out, donated in pair_donated(program).items():
        writer = producer.get(out)
        for i, e in enumerate(program.equations):
            if writer is not None and i != writer and donated in e.inputs and not _needs(needs, i, writer):
                needs[writer].add(i)
    order = producers_first(range(len(needs)), needs.__getitem__)
    return replace(program, equations=tuple(program.equations[i] for i in order))


def _needs(needs: list[set[int]], a: int, b: int) -> bool:
    """Whether equation `a` depends on equation `b`."""
    seen, stack = set(), [a]
    while stack:
        i = stack.pop()
        if i == b:
            return True
        if i not in seen:
            seen.add(i)
            stack.extend(needs[i])
    return False
