"""Pooling fusion: a convolution hands its elements to the max pooling behind it, and only their maxima are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adtrain.core.fused import FUSED, body_of, convolution_p, fuse, pooled_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.target import Target
from adtrain.passes.groups import Groups


def fuse_pooling(program: Program, target: Target) -> Program:
    """One `pooled` equation for a convolution and the max pooling that alone reads it, where there is a kernel that
    should be faster than the two apart."""
    groups = Groups(program)
    read = [*program.outputs, *(v for e in program.equations for v in e.inputs)]
    for i, e in enumerate(program.equations):
        p = groups.producer.get(e.inputs[0]) if e.primitive.name == "max_pool2d" else None
        if p is not None and read.count(e.inputs[0]) == 1 and _has_kernel(program.equations[p], e, target):
            groups.merge(p, i)
    return groups.rewritten(_joined)


def _has_kernel(convolution: Equation, pool: Equation, target: Target) -> bool:
    if convolution.primitive in FUSED - {convolution_p}:
        return False
    product, *others = body_of(convolution).equations
    made = {v for e in (product, *others) for v in e.outputs}
    beside = [v for e in others for v in e.inputs if v not in made]
    if any(math.prod(v.type.shape[-2:]) > 1 for v in beside):
        return False
    name = f"{product.primitive.name}+{pool.primitive.name}"
    return bool(cuda_kernels(name, target, *(v.type for v in product.inputs), **product.params, **pool.params))


def _joined(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    convolution, pool = equations
    return fuse(pooled_p, [*body_of(convolution).equations, pool], pool.outputs)
