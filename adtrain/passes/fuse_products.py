"""Product fusion: a matrix product and the elementwise equation that reads it, as one kernel with an epilogue.

It fuses the bias and activation of a linear layer, the activation's mask on the input gradient, and the update of a
weight from its gradient. The product itself is never written to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from adtrain.core.fused import LOOPS, PRODUCT, fuse
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.groups import Groups


def fuse_products(program: Program) -> Program:
    """One `product` equation for a matrix product and the elementwise equation that reads it."""
    return fuse_epilogues(program, PRODUCT, lambda product, reader: _is_product(product))


def fuse_epilogues(program: Program, form: str, fusible: Callable[[Equation, Equation], bool]) -> Program:
    """One equation for a producer and the elementwise equation that reads it, for pairs that are ``fusible``."""
    groups = Groups(program)
    for i, e in enumerate(program.equations):
        if not by_element(e):
            continue
        for v in e.inputs:
            p = groups.producer.get(v)
            if p is None or len(groups.members[groups.of[p]]) > 1 or len(groups.members[groups.of[i]]) > 1:
                continue
            if fusible(program.equations[p], e) and reads_by_element(e, v) and groups.can_merge(p, i):
                groups.merge(p, i)
    # At the producer's position: so a gradient and its arguments need not stay in memory until a later update.
    return groups.rewritten(partial(fuse, form), anchor=min)


def _is_product(equation: Equation) -> bool:
    """Whether it is a matrix product that takes an epilogue; on the CPU a batch may have one axis. An epilogue counts
    rows and columns in 32 bits."""
    c = equation.outputs[0]
    if not equation.has(Trait.MATMUL) or max(c.type.shape[-2:]) >= 2**31:
        return False
    return len(c.type.shape) <= 3 or c.device != "cpu"


def reads_by_element(equation: Equation, v: Variable) -> bool:
    """Whether each element of the elementwise result needs only the same element of `v`."""
    if equation.outputs[0].type.shape != v.type.shape:
        return False
    if equation.form != LOOPS:
        return not equation.has(Trait.BROADCAST)
    body: Program = equation.params["body"]
    inner = body.inputs[equation.inputs.index(v)]
    return all(inner not in e.inputs or not e.has(Trait.BROADCAST) for e in body.equations)
