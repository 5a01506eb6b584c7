"""Bias gradients: the sum over g is computed by the weight gradient's kernel, which reads g anyway.

conv2d_weight_grad(x, g) and sum(g)               ->    conv2d_weight_grad_sum(x, g)
conv2d_weight_grad_pooled(x, g, at) and sum(g)    ->    conv2d_weight_grad_pooled_sum(x, g, at)    over all but channels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adtrain.core.program import Equation, Program, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.rewrites import WITH_BIAS_GRADIENT
from adtrain.core.staging import Results, keeps
from adtrain.core.target import Target
from adtrain.passes.groups import Groups

BIAS_AXES = (0, 2, 3)
"""The axes that the gradient of a bias is summed over."""


@keeps(Results.EXACT)
def fuse_bias_gradients(program: Program, target: Target) -> Program:
    """One equation for a weight gradient and a bias gradient, where the GPU has a kernel for both."""
    groups = Groups(program)
    sums = {e.inputs[0]: i for i, e in enumerate(program.equations) if _sums_channels(e)}
    for i, e in enumerate(program.equations):
        read = e.inputs[WITH_BIAS_GRADIENT[e.primitive][0]] if e.primitive in WITH_BIAS_GRADIENT else None
        if read not in sums or not _has_kernel(e, target) or not groups.can_merge(groups.of[sums[read]], groups.of[i]):
            continue
        groups.merge(groups.of[sums.pop(read)], groups.of[i])
    return groups.rewritten(_joined)


def _sums_channels(e: Equation) -> bool:
    return e.primitive.name == "sum" and len(e.inputs[0].type.shape) == 4 and tuple(e.params["axes"]) == BIAS_AXES


def _has_kernel(e: Equation, target: Target) -> bool:
    joined = WITH_BIAS_GRADIENT[e.primitive][1]
    return bool(cuda_kernels(joined.name, target, *(v.type for v in e.inputs), **e.params))


def _joined(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    total, other = sorted(equations, key=lambda e: len(e.inputs))
    joined = WITH_BIAS_GRADIENT[other.primitive][1]
    return replace(other, primitive=joined, outputs=(*other.outputs, *total.outputs))
