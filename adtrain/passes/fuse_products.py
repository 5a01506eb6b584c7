"""Product fusion: what is done to each element of a matrix product is done while the product is in cache.

Bias and activation of a linear layer, the activation's mask on the gradient of its input, and the update of its weight
from the gradient: none of these products is written to memory and read again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from adtrain.core.fused import fuse, loops_p, product_p
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.groups import Groups


def fuse_products(program: Program) -> Program:
    """One `product` equation for a matrix product and the elementwise equation that reads it."""
    return with_readers(program, product_p, lambda p, e: _is_product(p))


def with_readers(program: Program, primitive: Primitive, alike: Callable[[Equation, Equation], bool]) -> Program:
    """One equation for a product and an elementwise equation that reads it and is ``alike`` enough."""
    groups = Groups(program)
    for i, e in enumerate(program.equations):
        if e.primitive is not loops_p and not elementwise(e):
            continue
        for v in e.inputs:
            p = groups.producer.get(v)
            if p is None or len(groups.members[groups.of[p]]) > 1 or len(groups.members[groups.of[i]]) > 1:
                continue
            if alike(program.equations[p], e) and reads_whole(e, v) and groups.can_merge(p, i):
                groups.merge(p, i)
    # at the product's place, so that a gradient and what it was computed from are not kept for a later update
    return groups.rewritten(partial(fuse, primitive), anchor=min)


def _is_product(equation: Equation) -> bool:
    """Whether it is a matrix product that others can be fused with: on the CPU none of a batch of matrices."""
    c = equation.outputs[0]
    return equation.primitive.name == "matmul" and (len(c.type.shape) == 2 or c.device != "cpu")


def reads_whole(equation: Equation, v: Variable) -> bool:
    """Whether each element of the result needs that element of `v` alone."""
    if equation.outputs[0].type.shape != v.type.shape:
        return False
    if equation.primitive is not loops_p:
        return equation.primitive.name != "broadcast_to"
    body: Program = equation.params["body"]
    inner = body.inputs[equation.inputs.index(v)]
    return all(inner not in e.inputs or e.primitive.name != "broadcast_to" for e in body.equations)
