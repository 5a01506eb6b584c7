"""Recurrent weight gradients: the gradient's kernel for large networks packs the operands of this product as it goes.

lstm_grad(...), matmul(ds, before, transpose_a) and sum(total, 0)    ->    lstm_weight_grad(...)

and the same of other cells. `total` is a sum over the steps; that over the batch is the gradient of a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.rewrites import WITH_WEIGHT_GRADIENTS
from adtrain.core.staging import Results, keeps
from adtrain.core.target import Target


@keeps(Results.ROUNDING)
def fuse_recurrent_gradients(program: Program, target: Target) -> Program:
    """Compute a recurrent layer's gradient with those by weight_hh and biases, where the GPU has a kernel for all."""
    producer = {v: e for e in program.equations for v in e.outputs}
    fused: dict[Equation, Equation] = {}
    removed: set[Equation] = set()
    for product in filter(_is_weight_gradient, program.equations):
        ds, before = (_before_reshapes(v, producer) for v in product.inputs)
        gradient = producer.get(before)
        if gradient is None or gradient.primitive not in WITH_WEIGHT_GRADIENTS:
            continue
        n, variant = WITH_WEIGHT_GRADIENTS[gradient.primitive]
        types = [v.type for v in gradient.inputs]
        outputs = list(gradient.outputs)
        if outputs[n - 1 : n + 1] != [ds, before] or not cuda_kernels(variant.name, target, *types, **gradient.params):
            continue

        views = [
            e for e in program.equations if e.has(Trait.RESHAPE) and _before_reshapes(e.inputs[0], producer) is before
        ]
        totals = outputs[n + 1 : 2 * n + 1]
        sum_of = {total: e for total in totals for e in program.readers.get(total, ()) if _sums_rows(e)}
        unneeded = {before, *totals, *(e.outputs[0] for e in views)}
        readers = {e for v in unneeded for e in program.readers.get(v, ())}
        if readers != {product, *views, *sum_of.values()} or not unneeded.isdisjoint(program.outputs):
            continue

        of_bias = variant.output_types(types, gradient.params)[n + 1]
        biases = [  # nothing reads the gradient of a bias that the Program does not sum
            sum_of[total].outputs[0] if total in sum_of else Variable(of_bias, total.device) for total in totals
        ]
        outputs[n : 2 * n + 1] = [*product.outputs, *biases]
        fused[gradient] = replace(gradient, primitive=variant, outputs=tuple(outputs))
        removed |= readers
    return replace(program, equations=tuple(fused.get(e, e) for e in program.equations if e not in removed))


def _is_weight_gradient(e: Equation) -> bool:
    if not e.has(Trait.MATMUL) or e.params.get("precision") != FULL:
        return False
    return bool(e.params["transpose_a"] and not e.params["transpose_b"])


def _sums_rows(e: Equation) -> bool:
    return e.primitive.name == "sum" and tuple(e.params["axes"]) == (0,)


def _before_reshapes(v: Variable, producer: Mapping[Variable, Equation]) -> Variable:
    while v in producer and producer[v].has(Trait.RESHAPE):
        (v,) = producer[v].inputs
    return v
