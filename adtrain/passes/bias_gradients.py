"""The gradient of a convolution's bias, taken while another gradient reads the same numbers.

conv2d_weight_grad(x, g) and sum(g)               ->    conv2d_weight_grad_sum(x, g)
conv2d_weight_grad_pooled(x, g, at) and sum(g)    ->    conv2d_weight_grad_pooled_sum(x, g, at)    over all but channels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.target import Target
from adtrain.passes.groups import Groups

READS = {"conv2d_weight_grad": 1, "conv2d_weight_grad_pooled": 1}
"""Which argument of each is the gradient that may be summed, too."""
OF_BIAS = (0, 2, 3)
"""The axes that a bias is added along."""


def join_bias_gradients(program: Program, target: Target) -> Program:
    """One equation for a gradient and the sum of what it reads, on a device that has a kernel for both: the GPU."""
    groups = Groups(program)
    sums = {e.inputs[0]: i for i, e in enumerate(program.equations) if _sums_channels(e)}
    for i, e in enumerate(program.equations):
        read = e.inputs[READS[e.primitive.name]] if e.primitive.name in READS else None
        if read not in sums or not _has_kernel(e, target) or not groups.can_merge(groups.of[sums[read]], groups.of[i]):
            continue
        groups.merge(groups.of[sums.pop(read)], groups.of[i])
    return groups.rewritten(_joined)


def _sums_channels(e: Equation) -> bool:
    return e.primitive.name == "sum" and len(e.inputs[0].type.shape) == 4 and tuple(e.params["axes"]) == OF_BIAS


def _with_sum(e: Equation) -> Primitive | None:
    return PRIMITIVES.get(f"{e.primitive.name}_sum")


def _has_kernel(e: Equation, target: Target) -> bool:
    joined = _with_sum(e)
    types = (v.type for v in e.inputs)
    return joined is not None and bool(cuda_kernels(joined.name, target, *types, **e.params))


def _joined(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    total, other = sorted(equations, key=lambda e: len(e.inputs))
    joined = _with_sum(other)
    assert joined is not None
    return replace(other, primitive=joined, outputs=(*other.outputs, *total.outputs))
