"""Bias gradients: the sum over g is computed by the weight gradient's kernel, which reads g anyway.

conv2d_weight_grad(x, g) and sum(g)               ->    conv2d_weight_grad_sum(x, g)
conv2d_weight_grad_pooled(x, g, at) and sum(g)    ->    conv2d_weight_grad_pooled_sum(x, g, at)    over all but channels

The body of the fused equation has both equations.
"""

from __future__ import annotations

from collections.abc import Sequence

from adtrain.core.fused import OF_POOLED, WITH_SUM, body_of, fuse
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.registry import cuda_kernels
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
        at = sums.get(e.inputs[1]) if e.name.removesuffix(OF_POOLED) == "conv2d_weight_grad" else None
        if at is None or not groups.can_merge(groups.of[at], groups.of[i]):
            continue
        joined = _joined([program.equations[at], e], ())
        if cuda_kernels(joined.name, target, *(v.type for v in joined.inputs), **joined.kernel_params):
            del sums[e.inputs[1]]
            groups.merge(groups.of[at], groups.of[i])
    return groups.rewritten(_joined)


def _sums_channels(e: Equation) -> bool:
    return e.primitive.name == "sum" and len(e.inputs[0].type.shape) == 4 and tuple(e.params["axes"]) == BIAS_AXES


def _joined(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    total, other = sorted(equations, key=lambda e: len(e.inputs))
    both = [*body_of(other).equations, total]
    return fuse(other.name + WITH_SUM, both, [*other.outputs, *total.outputs], other.inputs)
