"""Gradients through max pooling: kept where they are pooled, instead of spread out among zeros.

Of the windows of a max pooling each passes its cotangent to one element and zeros to the others. What follows on the
way back, the mask of a relu and the gradients of a convolution, can work on the one element of each window:

    where(0 < r, put(ct, at), 0) = put(where(0 < p, ct, 0), at)      with p, at = max_pool2d(r), as p is r at `at`
    sum(put(g, at)) = sum(g)                                         over the images and their elements
    conv2d_input_grad(put(g, at), w), conv2d_weight_grad(x, put(g, at))   have kernels that visit live windows only
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.target import Target
from adtrain.core.types import ArrayType
from adtrain.passes.items import item_kernel

GRADIENT = {"conv2d_input_grad": 0, "conv2d_weight_grad": 1}
"""Which argument of each is the gradient that may be a pooled one spread out."""


def sink_masks(program: Program) -> Program:
    """The mask of a relu in front of a max pooling, applied to the pooled gradient instead of the spread one."""
    producer = {v: e for e in program.equations for v in e.outputs}
    zeros = {v for v, x in program.constants.items() if x.size == 1 and x.item() == 0}
    equations: list[Equation] = []
    for e in program.equations:
        put, pool = _masked_put(e, producer, zeros)
        if put is None or pool is None:
            equations.append(e)
            continue
        (ct, at), (zero, _) = put.inputs, producer[e.inputs[0]].inputs
        pooled = pool.outputs[0]
        mask = Variable(ArrayType(ct.type.shape, producer[e.inputs[0]].outputs[0].type.dtype), ct.device)
        alive = Variable(ct.type, ct.device)
        equations += [
            replace(producer[e.inputs[0]], inputs=(zero, pooled), outputs=(mask,)),
            replace(e, inputs=(mask, ct, e.inputs[2]), outputs=(alive,)),
            replace(put, inputs=(alive, at), outputs=e.outputs),
        ]
    return replace(program, equations=tuple(equations))


def _masked_put(
    e: Equation, producer: dict[Variable, Equation], zeros: set[Variable]
) -> tuple[Equation | None, Equation | None]:
    """For where(0 < r, put(ct, at), 0) the put, and the max pooling of r that made `at`."""
    nothing = None, None
    if e.primitive.name != "where" or e.inputs[2] not in zeros:
        return nothing
    less, put = producer.get(e.inputs[0]), producer.get(e.inputs[1])
    if less is None or put is None or less.primitive.name != "less" or put.primitive.name != "max_pool2d_put":
        return nothing
    pool = producer.get(put.inputs[1])
    if pool is None or pool.primitive.name != "max_pool2d" or pool.params["windows"] != put.params["windows"]:
        return nothing
    return (put, pool) if less.inputs[0] in zeros and less.inputs[1] is pool.inputs[0] else nothing


def keep_sums_pooled(program: Program) -> Program:
    """Sums over images and their elements taken of the pooled gradient."""
    put = _puts(program)
    equations = [
        replace(e, inputs=put[e.inputs[0]].inputs[:1]) if _sums_images(e) and e.inputs[0] in put else e
        for e in program.equations
    ]
    return replace(program, equations=tuple(equations))


def keep_gradients_pooled(program: Program) -> Program:
    """Gradients of convolutions taken of the pooled gradient, on a device that has kernels for them: the CPU."""
    put = _puts(program)
    return replace(program, equations=tuple(_of_pooled(e, put, _on_cpu) for e in program.equations))


def leave_out_spread_gradients(program: Program, target: Target) -> Program:
    """The same on a GPU, where nothing else reads the spread gradient, so that it need not be written."""
    put = _puts(program)
    pooled = {e: _of_pooled(e, put, partial(_on_gpu, target=target)) for e in program.equations}
    needed = {*program.outputs, *(v for e in program.equations if pooled[e] is e for v in e.inputs)}
    equations = (e if needed.intersection(e.inputs).intersection(put) else pooled[e] for e in program.equations)
    return replace(program, equations=tuple(equations))


def _puts(program: Program) -> dict[Variable, Equation]:
    return {e.outputs[0]: e for e in program.equations if e.primitive.name == "max_pool2d_put"}


def _sums_images(e: Equation) -> bool:
    return e.primitive.name == "sum" and {2, 3} <= set(e.params["axes"])


def _of_pooled(e: Equation, put: dict[Variable, Equation], has_kernel: Callable[[Equation], bool]) -> Equation:
    at = GRADIENT.get(e.primitive.name)
    source = None if at is None else put.get(e.inputs[at])
    pooled = PRIMITIVES.get(f"{e.primitive.name}_pooled")
    if at is None or source is None or pooled is None:
        return e
    inputs = (*e.inputs[:at], *source.inputs, *e.inputs[at + 1 :])
    found = replace(e, primitive=pooled, inputs=inputs, params={**e.params, **source.params})
    return found if has_kernel(found) else e


def _on_cpu(e: Equation) -> bool:
    return item_kernel(e) is not None


def _on_gpu(e: Equation, target: Target) -> bool:
    return bool(cuda_kernels(e.primitive.name, target, *(v.type for v in e.inputs), **e.params))
