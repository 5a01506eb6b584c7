"""Gradients of convolutions behind a max pooling of windows of 2 x 2, for the tests of their kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from program_samples import Step, fused_of

from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.weight_gradients import BIAS_AXES
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel, Target
from adtrain.core.precision import FULL, rounded
from adtrain.core.program import Equation
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.pooling import SparsePoolInputGrad
from adtrain.lowering.cuda.conv.problem import ConvProblem, PaddedIndex
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad
from adtrain.ops.common import sum_p
from adtrain.ops.conv import Window, input_grad_p, weight_grad_by_image_p, weight_grad_p
from adtrain.ops.elementwise import square_p
from adtrain.ops.pool import Windows, max_pool2d_put_p

WINDOWS = Windows((2, 2), (2, 2), (0, 0))


class Work(NamedTuple):
    """A gradient, its arguments, and a kernel for it."""

    form: str
    problem: ConvProblem
    arrays: list[np.ndarray]
    kernel: CudaKernel


def conv_problem(
    image: tuple[int, ...], filters: int, kernel: tuple[int, int], padding: tuple[int, int], precision: str = FULL
) -> ConvProblem:
    size = [n + 2 * p - k + 1 for n, p, k in zip(image[2:], padding, kernel, strict=True)]
    return ConvProblem(image, (image[0], filters, *size), kernel, (1, 1), padding, (1, 1), precision=precision)


def drawn(problem: ConvProblem, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Images, weights, a pooled gradient, and where in their windows its numbers are."""
    rng = np.random.default_rng(seed)
    (count, filters, rows, columns), channels = problem.outputs, problem.images[1]
    pooled = (count, filters, rows // 2, columns // 2)
    shapes = (problem.images, (filters, channels, *problem.kernel), pooled)
    x, w, g = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return x, w, g, rng.integers(0, 4, pooled).astype(np.int32)


def equation(form: str, problem: ConvProblem) -> Equation:
    """The gradient by the images from (g, where, w), or by the weights from (x, g, where)."""
    (count, filters, rows, columns), channels = problem.outputs, problem.images[1]
    weight = filters, channels, *problem.kernel
    g, x, w = (
        ArrayType(shape, np.dtype(np.float32))
        for shape in ((count, filters, rows // 2, columns // 2), problem.images, weight)
    )
    where = ArrayType(g.shape, np.dtype(np.int32))
    known = {"window": Window((1, 1), problem.padding, problem.dilation, 1), "precision": problem.precision}
    spread = {"windows": WINDOWS, "shape": problem.outputs}
    steps: list[Step]
    if form == "conv2d_input_grad_pooled":
        steps = [(max_pool2d_put_p, (0, 1), spread), (input_grad_p, (3, 2), {**known, "size": problem.images[2:]})]
        return fused_of(form, [g, where, w], steps, [4])
    steps = [(max_pool2d_put_p, (1, 2), spread), (weight_grad_p, (0, 3), {**known, "size": problem.kernel})]
    if "by_image" in form:
        steps[1] = weight_grad_by_image_p, *steps[1][1:]
        norms: list[Step] = [(square_p, (4,), {}), (sum_p, (5,), {"axes": (1, 2, 3, 4)})]
        is_norms = form.endswith("norms")
        return fused_of(form, [x, g, where], [*steps, *norms] if is_norms else steps, [6 if is_norms else 4])
    if form == "conv2d_weight_grad_pooled":
        return fused_of(form, [x, g, where], steps, [4])
    return fused_of(form, [x, g, where], [*steps, (sum_p, (1,), {"axes": BIAS_AXES})], [4, 5])


def by_images(
    problem: ConvProblem, w: np.ndarray, g: np.ndarray, where: np.ndarray, target: Target = H200
) -> Work | None:
    """The gradient by the images, where it is supported."""
    grad = SparsePoolInputGrad(PaddedIndex(problem.transposed()), target)
    return Work("conv2d_input_grad_pooled", problem, [g, where, w], grad.kernels()[0]) if grad.supported() else None


def by_weights(
    problem: ConvProblem, x: np.ndarray, g: np.ndarray, where: np.ndarray, target: Target = H200
) -> list[Work]:
    """The gradients by weights, by weights and bias, by weights for each image, and the norms of these, with all
    supported stages."""
    of_form = {
        "conv2d_weight_grad_pooled": {},
        "conv2d_weight_grad_pooled_sum": {"bias": True},
        "conv2d_weight_grad_by_image_pooled": {"by_image": True},
        "conv2d_weight_grad_by_image_pooled_norms": {"by_image": True, "norms": True},
    }
    found: list[Work] = []
    for form, kind in of_form.items():
        choices = ShiftedWeightGrad(PaddedIndex(problem), target, pooled=True, **kind).choices()
        found += [Work(form, problem, [x, g, where], grad.kernels()[0]) for grad in choices if grad.supported()]
    return found


def expected(work: Work, device: str = "cpu") -> list[np.ndarray]:
    """In float64, of rounded numbers, by the equations one after another. The sum for the bias is of rounded numbers,
    too."""
    wide = [rounded(v, work.problem.precision).astype(float) if v.dtype.kind == "f" else v for v in work.arrays]
    body = equation(work.form, replace(work.problem, precision=FULL)).params["body"]
    known = dict(zip(body.inputs, (array(v, device=device) for v in wide), strict=True))
    with np.errstate(invalid="ignore"):
        for e in body.equations:
            (known[e.outputs[0]],) = tree.leaves(bind(e.primitive, *(known[v] for v in e.inputs), **e.params))
    return [known[v].numpy() for v in body.outputs]
