"""Weight gradients with what else their kernels compute: gradients of biases, or of a recurrent layer; squared norms.

conv2d_weight_grad(x, g) and sum(g)               ->    conv2d_weight_grad_sum(x, g)
conv2d_weight_grad_pooled(x, g, at) and sum(g)    ->    conv2d_weight_grad_pooled_sum(x, g, at)    over all but channels
conv2d_weight_grad_by_image(x, g) and sum(g)      ->    conv2d_weight_grad_by_image_sum(x, g)      over pixels
sum(square(conv2d_weight_grad_by_image(x, g)))    ->    conv2d_weight_grad_by_image_norms(x, g)    over all but images
lstm_grad(...), matmul(ds, before, transpose_a) and sum(total, 0)    ->    lstm_weight_grad(...)

The kernel of a weight gradient of a convolution reads g anyway. The kernel of a recurrent layer's gradient packs the
operands of the product that is the gradient by weight_hh; and likewise for other cells. `total` is a sum over the
steps. Its sum over the batch is the gradient of a bias. The body of a fused equation has all these equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adtrain.core.kernel import Target, cuda_kernels
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import OF_POOLED, WITH_NORMS, WITH_SUM, Equation, Program, Variable, body_of, fuse
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType
from adtrain.passes.fusion import sum_of_squares
from adtrain.passes.groups import Groups
from adtrain.passes.simplify import remove_dead_code

BIAS_AXES = (0, 2, 3)
"""The axes that the gradient of a bias is summed over."""
SUMMED: dict[str, tuple[int, ...]] = {"conv2d_weight_grad": BIAS_AXES, "conv2d_weight_grad_by_image": (2, 3)}
"""The axes of sums that weight gradients have kernels for."""


@keeps(Results.EXACT)
def fuse_bias_gradients(program: Program, target: Target) -> Program:
    """One equation for a weight gradient and a bias gradient, where the GPU has a kernel for both."""
    groups = Groups(program)
    sums = {key: i for i, e in enumerate(program.equations) if (key := _sum_of_channels(e))}
    for i, e in enumerate(program.equations):
        axes = SUMMED.get(e.name.removesuffix(OF_POOLED), ())
        at = sums.get((e.inputs[1], axes)) if axes else None
        if at is None or not groups.can_merge(groups.of[at], groups.of[i]):
            continue
        joined = _joined([program.equations[at], e], ())
        if cuda_kernels(joined.name, target, *(v.type for v in joined.inputs), **joined.kernel_params):
            del sums[e.inputs[1], axes]
            groups.merge(groups.of[at], groups.of[i])
    return groups.rewritten(_joined)


def _sum_of_channels(e: Equation) -> tuple[Variable, tuple[int, ...]] | None:
    """The images and the axes of a sum that leaves their channels."""
    axes = tuple(e.params["axes"]) if e.primitive.name == "sum" and len(e.inputs[0].type.shape) == 4 else ()
    return (e.inputs[0], axes) if axes in SUMMED.values() else None


def _joined(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    total, other = sorted(equations, key=lambda e: len(e.inputs))
    both = [*body_of(other).equations, total]
    return fuse(other.name + WITH_SUM, both, [*other.outputs, *total.outputs], other.inputs)


@keeps(Results.ROUNDING)
def fuse_gradient_norms(program: Program, target: Target) -> Program:
    """One equation for the weight gradients of images and their squared norms, where only these are needed and the GPU
    has a kernel for them."""
    fused: dict[Equation, Equation] = {}
    for e in program.equations:
        readers = program.readers.get(e.outputs[0], ())
        if e.name.removesuffix(OF_POOLED) != "conv2d_weight_grad_by_image" or len(readers) != 1:
            continue
        (square,) = readers
        total = None if e.outputs[0] in program.outputs else sum_of_squares(program, square)
        if total is None:
            continue
        axes = tuple(range(1, len(e.outputs[0].type.shape)))
        adds = replace(total, inputs=square.outputs, params={"axes": axes})
        joined = fuse(e.name + WITH_NORMS, [*body_of(e).equations, square, adds], total.outputs, e.inputs)
        if cuda_kernels(joined.name, target, *(v.type for v in joined.inputs), **joined.kernel_params):
            fused[total] = joined
    return remove_dead_code(replace(program, equations=tuple(fused.get(e, e) for e in program.equations)))


WEIGHT_GRAD = "_weight_grad"
"""The end of the name of the form: a recurrent primitive's gradient, and those by weight_hh and the biases."""

GRAD = "_grad"
"""The end of the name of a recurrent primitive's gradient."""


@keeps(Results.EXACT)
def fuse_recurrent_gradients(program: Program, target: Target) -> Program:
    """Compute a recurrent layer's gradient with those by weight_hh and biases, where the GPU has a kernel for all."""
    fused: dict[Equation, Equation] = {}
    removed: set[Equation] = set()
    for product in filter(_is_weight_gradient, program.equations):
        ds, before = (program.before_reshapes(v) for v in product.inputs)
        gradient = program.producer.get(before)
        if gradient is None or not _is_gradient(gradient, product, ds, before):
            continue
        n = gradient.outputs.index(before)
        totals = gradient.outputs[n + 1 : 2 * n + 1]
        reshapes = (e for e in program.equations if e.has(Trait.RESHAPE))
        views = [e for e in reshapes if program.before_reshapes(e.inputs[0]) is before]
        sum_of = {total: e for total in totals for e in program.readers.get(total, ()) if _sums_rows(e)}
        unneeded = {before, *totals, *(e.outputs[0] for e in views)}
        readers = {e for v in unneeded for e in program.readers.get(v, ())}
        if readers != {product, *views, *sum_of.values()} or not unneeded.isdisjoint(program.outputs):
            continue

        # The kernel computes the gradient of each bias, also of one that the Program does not need.
        found = _fused(gradient, product, ds, before, [sum_of.get(v) or _sum(v, gradient) for v in totals])
        if cuda_kernels(found.name, target, *(v.type for v in found.inputs), **found.kernel_params):
            fused[gradient] = found
            removed |= readers
    return replace(program, equations=tuple(fused.get(e, e) for e in program.equations if e not in removed))


def _fused(gradient: Equation, product: Equation, ds: Variable, before: Variable, sums: Sequence[Equation]) -> Equation:
    """One equation for all. The cotangents of sums and states come first, then those of weight_hh and the biases."""
    views = [_reshape(x, v, product) for x, v in zip((ds, before), product.inputs, strict=True)]
    product = replace(product, inputs=tuple(view.outputs[0] for view in views))
    inner = {before, *(e.inputs[0] for e in sums)}
    needed = [v for e in (gradient, product, *sums) for v in e.outputs if v not in inner]
    form = gradient.name.removesuffix(GRAD) + WEIGHT_GRAD
    return fuse(form, [gradient, *views, product, *sums], needed, gradient.inputs)


def _reshape(x: Variable, like: Variable, reader: Equation) -> Equation:
    """``x`` as a matrix, as ``like`` is; other equations may read ``like`` itself."""
    params, out = {"shape": like.type.shape}, like.like()
    return Equation(PRIMITIVES["reshape"], (x,), params, (out,), reader.scope, reader.phase)


def _sum(total: Variable, gradient: Equation) -> Equation:
    out = total.like(ArrayType(total.type.shape[1:], total.type.dtype))
    return Equation(PRIMITIVES["sum"], (total,), {"axes": (0,)}, (out,), gradient.scope, gradient.phase)


def _is_gradient(e: Equation, product: Equation, ds: Variable, before: Variable) -> bool:
    """Whether ``product`` is the gradient of weight_hh, the second argument of the recurrent gradient ``e``.

    The first outputs of ``e`` are cotangents of the sums; ``ds`` is the last one of them. The next output, ``before``,
    has the states before the steps.
    """
    if not e.has(Trait.RECURRENT) or not e.name.endswith(GRAD):
        return False
    weight, n = e.inputs[1].type, e.outputs.index(before)
    states = len(before.type.shape) == 3 and before.type.shape[2:] == weight.shape[1:]
    return n > 0 and states and e.outputs[n - 1] is ds and product.outputs[0].type == weight


def _is_weight_gradient(e: Equation) -> bool:
    return e.has(Trait.MATMUL) and bool(e.params.get("transpose_a")) and not e.params.get("transpose_b")


def _sums_rows(e: Equation) -> bool:
    return e.primitive.name == "sum" and tuple(e.params["axes"]) == (0,)
