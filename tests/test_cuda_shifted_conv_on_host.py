"""Shifted implicit GEMM convolutions, and what is fused with convolutions: the kernels on the CPU, against the
reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conv_samples import cases, drawn, stride_one
from cuda_on_host import Host, host
from product_samples import NOISE, ROUNDINGS, errors, sequential_fma
from program_samples import ON_GPU, Step, fused_of

from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.product import CONVOLUTION
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel, MemoryLayout
from adtrain.core.precision import rounded
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.problem import Algorithm, ConvProblem, PaddedIndex
from adtrain.lowering.cuda.conv.shifted import ShiftedConv
from adtrain.lowering.cuda.conv.shifted_fp16x2 import Fp16x2Conv, Fp16x2WeightGrad
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad
from adtrain.ops.common import sum_p
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_by_image_p, weight_grad_p
from adtrain.ops.elementwise import square_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TOLERANCE = 5e-7
"""Of the norm of the difference over the norm."""


TARGET = H200._replace(multiprocessors=2)
"""With few multiprocessors a block takes several tiles."""


def equation(primitive: Primitive, arrays: list[np.ndarray], params: dict[str, Any]) -> Equation:
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    out = primitive.shape(*(v.type for v in inputs), **params)
    assert isinstance(out, ArrayType)
    return Equation(primitive, inputs, params, (Variable(out, "gpu"),))


def agree(found: np.ndarray, expected: np.ndarray) -> bool:
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    return bool(np.linalg.norm(found[held] - expected[held]) <= TOLERANCE * np.linalg.norm(expected[held]))


def directions(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, g: np.ndarray
) -> Iterator[tuple[Equation, Any, Algorithm]]:
    """The convolution and its gradients: the equation, its arguments, and each shifted implicit GEMM."""
    window = {"window": Window((1, 1), problem.padding, problem.dilation, 1), "precision": problem.precision}
    sized = {**window, "size": problem.images[2:]}
    index, transposed = PaddedIndex(problem), PaddedIndex(problem.transposed())
    for kind in (ShiftedConv, Fp16x2Conv):
        forward, backward = kind(index, TARGET, False), kind(transposed, TARGET, True)
        if forward.supported():
            yield equation(conv2d_p, [x, w], window), (x, w), forward
        if backward.supported():
            yield equation(input_grad_p, [g, w], sized), (g, w), backward
    sized = {**window, "size": problem.kernel}
    grads: list[ShiftedWeightGrad | Fp16x2WeightGrad] = [*ShiftedWeightGrad(index, TARGET).choices()]
    for grad in [*grads, Fp16x2WeightGrad(index, TARGET)]:
        if grad.supported():
            yield equation(weight_grad_p, [x, g], sized), (x, g), grad
    for grad in ShiftedWeightGrad(index, TARGET, by_image=True).choices():
        if grad.supported():
            yield equation(weight_grad_by_image_p, [x, g], sized), (x, g), grad


def run(host: Host, e: Equation, algorithm: Algorithm, arrays: Any) -> np.ndarray:
    (kernel,) = algorithm.kernels()
    return host.computed(e, kernel, arrays)[0]


def check(host: Host, problem: ConvProblem, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> None:
    for e, arrays, algorithm in directions(problem, x, w, g):
        wide = [rounded(v, problem.precision).astype(float) for v in arrays]
        with np.errstate(invalid="ignore"):
            expected = e.primitive.reference(*wide, **{**e.params, "precision": "full"})
        assert agree(run(host, e, algorithm, arrays), expected), e.name


@pytest.mark.parametrize(
    ("image", "filters", "kernel", "padding", "dilation", "precision"),
    [
        pytest.param((2, 20, 9, 8), 33, (3, 3), (1, 1), (1, 1), "full", marks=pytest.mark.exhaustive),
        ((1, 9, 12, 21), 5, (3, 2), (2, 0), (2, 1), "tf32"),
        pytest.param((1, 9, 12, 21), 5, (3, 2), (2, 0), (2, 1), "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_shifted_convolutions_are_right(
    host: Host,
    image: tuple[int, ...],
    filters: int,
    kernel: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    precision: str,
) -> None:
    size = [n + 2 * p - (k - 1) * d for n, p, k, d in zip(image[2:], padding, kernel, dilation, strict=True)]
    problem = stride_one(image, (image[0], filters, *size), kernel, padding, dilation, precision)
    check(host, problem, *drawn(image, (filters, image[1], *kernel), problem.outputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("image", "filters"), [((3, 5, 9, 8), 33), ((2, 34, 7, 7), 70)])
def test_norms_of_weight_gradients_of_images_are_right(host: Host, image: tuple[int, ...], filters: int) -> None:
    problem = stride_one(image, (image[0], filters, *image[2:]), (3, 3), (1, 1))
    x, g = drawn(image, problem.outputs)
    g[0, 3, 2, 1] = np.inf
    sized = {"window": Window((1, 1), (1, 1), (1, 1), 1), "precision": "full", "size": (3, 3)}
    steps: list[Step] = [(weight_grad_by_image_p, (0, 1), sized), (square_p, (2,), {})]
    steps.append((sum_p, (3,), {"axes": (1, 2, 3, 4)}))
    e = fused_of("conv2d_weight_grad_by_image_norms", [ArrayType(v.shape, v.dtype) for v in (x, g)], steps, [4])
    choices = ShiftedWeightGrad(PaddedIndex(problem), TARGET, by_image=True, norms=True).choices()
    (found,) = [run(host, e, each, [x, g]) for each in choices if each.supported()]
    with np.errstate(invalid="ignore"):
        gradients = weight_grad_by_image_p.reference(x.astype(float), g.astype(float), **sized)
        assert agree(found, np.square(gradients).sum((1, 2, 3, 4)))


@pytest.mark.exhaustive
def test_tiles_of_all_widths_give_the_same(host: Host) -> None:
    problem = stride_one((2, 8, 9, 13), (2, 20, 7, 11), (3, 3), (0, 0))
    x, w = drawn(problem.images, (20, 8, 3, 3))
    e = equation(conv2d_p, [x, w], {"window": Window((1, 1), (0, 0), (1, 1), 1), "precision": "full"})
    choices = ShiftedConv(PaddedIndex(problem), TARGET, False).choices()
    found = [run(host, e, t, [x, w]) for t in choices if t.columns in (64, 104)]
    assert agree(found[0], e.primitive.reference(x.astype(float), w.astype(float), **e.params))
    assert len({y.tobytes() for y in found}) == 1


def test_a_kernel_whose_stages_have_another_size_than_the_layout_does_not_compile(host: Host) -> None:
    problem = stride_one((1, 8, 9, 13), (1, 40, 7, 11), (3, 3), (0, 0))
    x, w = drawn(problem.images, (40, 8, 3, 3))
    e = equation(conv2d_p, [x, w], {"window": Window((1, 1), (0, 0), (1, 1), 1), "precision": "full"})
    (kernel,) = ShiftedConv(PaddedIndex(problem), TARGET, False).kernels()
    multiply = kernel.launches[1]
    assert isinstance(multiply.shared, MemoryLayout)
    shared = MemoryLayout(multiply.shared)
    shared.macros = multiply.shared.macros.replace("array_at<E, ", "array_at<E, 16 + ")
    with pytest.raises(AssertionError, match="MemoryLayout"):
        host.computed(e, replace(kernel, launches=(replace(multiply, shared=shared),)), [x, w])


@pytest.mark.exhaustive
def test_weight_gradient_with_underflowing_squares(host: Host) -> None:
    problem = stride_one((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1))
    x, _, g = drawn(problem.images, (33, 20, 3, 3), problem.outputs)
    x, g = x * np.float32(1e-18), g * np.float32(3e-19)
    params = {"window": Window((1, 1), (1, 1), (1, 1), 1), "size": (3, 3), "precision": "full"}
    e, grad = equation(weight_grad_p, [x, g], params), Fp16x2WeightGrad(PaddedIndex(problem), TARGET)
    expected = weight_grad_p.reference(x.astype(float), g.astype(float), **params)
    assert agree(run(host, e, grad, [x, g]), expected)


@pytest.mark.exhaustive
def test_infinity_and_nan_propagate_as_in_float32_sums(host: Host) -> None:
    problem = stride_one((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1))
    x, w, g = drawn(problem.images, (33, 20, 3, 3), problem.outputs)
    x[0, 1, 2, 3], x[1, 19, 5, 6], g[1, 3, 4, 5], g[0, 32, 0, 3] = np.inf, -np.inf, np.nan, np.inf
    check(host, problem, x, w, g)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda x: x.__setitem__((2, 1, 3), 1e-30), marks=pytest.mark.exhaustive),
        pytest.param(lambda x: x.__imul__(1e-35), marks=pytest.mark.exhaustive),
        pytest.param(lambda x: x.__setitem__(slice(1, None, 2), x[::2]), marks=pytest.mark.exhaustive),
    ],
    ids=["small among large numbers", "denormal numbers", "products that cancel"],
)
def test_images_that_fp16x2_does_not_hold_fall_back_to_bf16x3(host: Host, spoil: Callable[[np.ndarray], Any]) -> None:
    """The second of three images, which are so large that each has a tile of its own; the third one is zero."""
    problem = stride_one((3, 8, 18, 18), (3, 33, 18, 18), (3, 3), (1, 1))
    x, w = drawn(problem.images, (33, 8, 3, 3))
    w[:, 1::2] = -w[:, ::2]
    x[2] = 0
    spoil(x[1])
    params = {"window": Window((1, 1), (1, 1), (1, 1), 1), "precision": "full"}
    e = equation(conv2d_p, [x, w], params)
    index = PaddedIndex(problem)
    halves, pieces = (run(host, e, kind(index, TARGET, False), [x, w]) for kind in (Fp16x2Conv, ShiftedConv))
    np.testing.assert_array_equal(halves[1, :, 9], pieces[1, :, 9])
    np.testing.assert_array_equal(halves[2], pieces[2])
    assert not np.array_equal(halves[0, :, 5], pieces[0, :, 5])
    with np.errstate(invalid="ignore"):
        assert agree(halves, conv2d_p.reference(x.astype(float), w.astype(float), **params))


@pytest.mark.exhaustive
def test_fp16x2_represents_images_with_a_few_small_elements(host: Host) -> None:
    problem = stride_one((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1))
    x, w, g = drawn(problem.images, (33, 20, 3, 3), problem.outputs)
    x[0, 2, 1, 3] = x[1, 7, 8, 7] = g[1, 2, 3, 4] = 1e-9
    computed: dict[Any, np.ndarray] = {}
    for e, arrays, algorithm in directions(problem, x, w, g):
        found = computed[algorithm] = run(host, e, algorithm, arrays)
        assert agree(found, e.primitive.reference(*(v.astype(float) for v in arrays), **e.params))
        if isinstance(algorithm, Fp16x2Conv):
            bf16x3 = computed[ShiftedConv(algorithm.index, TARGET, algorithm.flipped)]
            assert not np.array_equal(found[:, :, 5], bf16x3[:, :, 5])
        elif isinstance(algorithm, Fp16x2WeightGrad):
            bf16x3 = next(y for p, y in computed.items() if isinstance(p, ShiftedWeightGrad))
            assert np.mean(found != bf16x3) > 0.1


@pytest.mark.exhaustive
def test_sums_of_small_elements_alone_keep_their_bits(host: Host) -> None:
    """Such an element that has neighbours neither in its channel nor in others, in an image of normal numbers."""
    problem = stride_one((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1))
    x, w, g = drawn(problem.images, (33, 20, 3, 3), problem.outputs)
    for images in (x, g):
        images[0, :, 5:] = images[:, 3] = 0
        images[0, 3, 7, 4] = 2.0123e-11
    for e, arrays, algorithm in directions(problem, x, w, g):
        expected = e.primitive.reference(*(v.astype(float) for v in arrays), **e.params)
        small = (expected != 0) & (abs(expected) < 1e-8)
        assert small.any()
        np.testing.assert_allclose(run(host, e, algorithm, arrays)[small], expected[small], 1e-6)


@pytest.mark.exhaustive
def test_fp16x2_must_represent_all_parts_of_an_image(host: Host) -> None:
    """Of images that are measured in three parts."""
    problem = stride_one((3, 66, 16, 17), (3, 33, 16, 17), (3, 3), (1, 1))
    x, w = drawn(problem.images, (33, 66, 3, 3))
    x[2, 65, 15, 16] = 1e-30
    e = equation(conv2d_p, [x, w], {"window": Window((1, 1), (1, 1), (1, 1), 1), "precision": "full"})
    index = PaddedIndex(problem)
    halves, pieces = (run(host, e, kind(index, TARGET, False), [x, w]) for kind in (Fp16x2Conv, ShiftedConv))
    np.testing.assert_array_equal(halves[2, :, -1], pieces[2, :, -1])
    assert not np.array_equal(halves[0, :, 0], pieces[0, :, 0])


@pytest.mark.parametrize(("kind", "m"), [(ShiftedConv, 20), (Fp16x2Conv, 40)])
@pytest.mark.parametrize("case", ["normal", "cancelling to 0.03", "growing", "one of 20 not zero"])
def test_sums_are_as_exact_as_sequential_fma(
    host: Host, case: str, kind: type[ShiftedConv | Fp16x2Conv], m: int
) -> None:
    n, k = 24, 96
    a, b = cases(m, n, k)[case]
    problem = stride_one((1, k, 1, n), (1, m, 1, n), (1, 1), (0, 0))
    x, w = b.reshape(1, k, 1, n), a.reshape(m, k, 1, 1)
    e = equation(conv2d_p, [x, w], {"window": Window((1, 1), (0, 0), (1, 1), 1), "precision": "full"})
    found = run(host, e, kind(PaddedIndex(problem), TARGET, False), [x, w]).reshape(m, n)
    taken, expected = errors(found, a, b), errors(sequential_fma(a, b), a, b)
    assert taken[0] <= max(NOISE * expected[0], ROUNDINGS)
    assert taken[1] <= max(NOISE * expected[1], ROUNDINGS)


def layer(x: Any, w: Any, bias: Any, keep: Any) -> Any:
    y = ops.relu(ops.conv2d(x, w, bias, padding=1))
    return y, ops.where(ops.less(0, x), ops.conv_transpose2d(y, w, padding=1) * keep, 0)


def strided(x: Any, w: Any, bias: Any, keep: Any) -> Any:
    y = ops.relu(ops.conv2d(x, w, bias, stride=2, padding=1))
    up = ops.conv_transpose2d(y, w, stride=2, padding=1, output_padding=1)
    return y, ops.where(ops.less(0, x), up * keep, 0)


def staged(f: Any, *arrays: np.ndarray) -> Program:
    return stage(f, ON_GPU).program(*(array(x) for x in arrays))


def every_kernel(host: Host, e: Equation) -> list[CudaKernel]:
    """Candidates with different tiles, and one of each file."""
    found = [k for k in host.lowering.candidates(e) if isinstance(k, CudaKernel)]
    return [*found[:2], *{k.launches[0].file: k for k in found}.values()]


@pytest.mark.parametrize(
    ("f", "image", "filters"),
    [
        pytest.param(layer, (2, 20, 7, 6), 33, marks=pytest.mark.exhaustive),
        (strided, (2, 3, 6, 8), 5),
    ],
)
def test_epilogue_is_applied_once_to_each_element(
    host: Host, f: Any, image: tuple[int, ...], filters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adtrain.lowering.cuda.conv.rules.MAX_SLOWDOWN", np.inf)
    program = staged(f, *drawn(image, (filters, image[1], 3, 3), (filters,), (image[0], 1, 1, 1)))
    fused = [e for e in program.equations if e.form == CONVOLUTION]
    assert len(fused) == 2
    for e in fused:
        arrays = drawn(*(v.type.shape for v in e.inputs))
        (expected,) = [e.primitive.reference(*arrays, **e.params)]
        for kernel in every_kernel(host, e):
            assert agree(host.computed(e, kernel, arrays)[0], expected), kernel.label
