"""Gradients through max pooling: computed from the pooled gradient, not from the spread one, which is mostly zeros.

Each pooling window passes its cotangent to one element, and zeros to the others. So the next equations of the backward
pass can process one element of each window:

    where(0 < r, put(ct, at), 0) = put(where(0 < p, ct, 0), at)      with p, at = max_pool2d(r), because p = r[at]
    sum(put(g, at)) = sum(g)                                         over the images and their pixels
    conv2d_input_grad(put(g, at), w), conv2d_weight_grad(x, put(g, at))   have kernels that visit the maxima only

The last two become fused equations, whose bodies have both operations. They are for finite values: the kernels leave
out the products of zeros with w and x. Where w or x is infinite or NaN, these are NaN in eager code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from adtrain.core.primitive import Trait
from adtrain.core.program import OF_POOLED, Equation, Program, Variable, fuse
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType

GRADIENT_AT = {"conv2d_input_grad": 0, "conv2d_weight_grad": 1, "conv2d_weight_grad_by_image": 1}
"""The argument of a convolution's gradient that is the gradient of the convolution's output."""


@keeps(Results.FINITE)
def fuse_maxpool_gradients(program: Program, has_kernel: Callable[[Equation], bool], all_readers: bool) -> Program:
    """Let equations that read a spread gradient read the pooled gradient instead. (Spread: with zeros between.)

    Args:
        has_kernel: whether an equation on a pooled gradient has a kernel that should be faster.
        all_readers: rewrite only where every reader of a spread gradient can be, so that it is never written.
    """
    program = _sink_masks(program)
    put = {e.outputs[0]: e for e in program.equations if e.has(Trait.MAX_POOL_GRAD)}
    program = replace(program, equations=tuple(_sum_pooled(e, put) for e in program.equations))
    pooled = {e: _on_pooled(e, put, has_kernel) for e in program.equations}
    if all_readers:
        spread = {*program.outputs, *(v for e in program.equations if pooled[e] is e for v in e.inputs)}
        pooled |= {e: e for e in program.equations if spread.intersection(e.inputs).intersection(put)}
    return replace(program, equations=tuple(pooled[e] for e in program.equations))


def _sink_masks(program: Program) -> Program:
    """Apply the mask of a relu before a max pooling to the pooled gradient instead of the spread one."""
    producer = program.producer
    zeros = {v for v, x in program.constants.items() if x.size == 1 and x.item() == 0}
    equations: list[Equation] = []
    for e in program.equations:
        put, pool = _masked_put(e, producer, zeros)
        if put is None or pool is None:
            equations.append(e)
            continue
        compare = producer[e.inputs[0]]
        (ct, at), (zero, _) = put.inputs, compare.inputs
        mask = ct.like(ArrayType(ct.type.shape, compare.outputs[0].type.dtype))
        masked = ct.like()
        equations += [
            replace(compare, inputs=(zero, pool.outputs[0]), outputs=(mask,)),
            replace(e, inputs=(mask, ct, e.inputs[2]), outputs=(masked,)),
            replace(put, inputs=(masked, at), outputs=e.outputs),
        ]
    return replace(program, equations=tuple(equations))


def _masked_put(
    e: Equation, producer: Mapping[Variable, Equation], zeros: set[Variable]
) -> tuple[Equation | None, Equation | None]:
    """For where(0 < r, put(ct, at), 0) the put, and the max pooling of r that computed `at`."""
    no_match = None, None
    if e.primitive.name != "where" or e.inputs[2] not in zeros:
        return no_match
    less, put = producer.get(e.inputs[0]), producer.get(e.inputs[1])
    if less is None or put is None or less.primitive.name != "less" or not put.has(Trait.MAX_POOL_GRAD):
        return no_match
    pool = producer.get(put.inputs[1])
    if pool is None or not pool.has(Trait.MAX_POOL) or pool.params["windows"] != put.params["windows"]:
        return no_match
    return (put, pool) if less.inputs[0] in zeros and less.inputs[1] is pool.inputs[0] else no_match


def _sum_pooled(e: Equation, put: dict[Variable, Equation]) -> Equation:
    """A sum over images and their pixels, taken of the pooled gradient."""
    sums = e.has(Trait.REDUCTION) and e.primitive.name == "sum" and {2, 3} <= set(e.params["axes"])
    return replace(e, inputs=put[e.inputs[0]].inputs[:1]) if sums and e.inputs[0] in put else e


def _on_pooled(e: Equation, put: dict[Variable, Equation], has_kernel: Callable[[Equation], bool]) -> Equation:
    """A gradient of a convolution that reads the pooled gradient, if there is a kernel for it; else `e`."""
    i = GRADIENT_AT.get(e.name)
    source = put.get(e.inputs[i]) if i is not None else None
    if i is None or source is None:
        return e
    before, after = e.inputs[:i], e.inputs[i + 1 :]
    spread = e.inputs[i].like()
    body = [replace(source, outputs=(spread,)), replace(e, inputs=(*before, spread, *after))]
    found = fuse(e.name + OF_POOLED, body, e.outputs, (*before, *source.inputs, *after))
    return found if has_kernel(found) else e
