"""What candidates are checked against: the reference in float64, on normal and on gradient-like numbers. No GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from vendor_equations import WINDOWS, convolutions, equation_of, matmul

from adtrain.backends.cuda.lower import Candidate
from adtrain.backends.cuda.narrow_values import in_bfloat16, narrowed
from adtrain.backends.cuda.tuner import measure as measuring
from adtrain.backends.cuda.tuner.measure import agree, arguments, expected, measure, tolerance, widened
from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.precision import TERMS
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.ops.channels_last import from_bfloat16_p, matmul_bfloat16_p
from adtrain.ops.conv import Window
from adtrain.ops.index import scatter_along_axis_p, take_p
from adtrain.ops.matmul import matmul_p
from adtrain.ops.normalisation import standardize_p
from adtrain.ops.reduce import argmax_p

PRODUCTS = [
    matmul((70, 30), (30, 50)),
    matmul((30, 70), (30, 50), ta=True),
    matmul((70, 30), (50, 30), tb=True),
    matmul((3, 30, 70), (3, 50, 30), ta=True, tb=True),
    matmul((3, 30), (30, 50)),
]
CONVOLUTIONS = [*convolutions(*WINDOWS[0]), *convolutions(*WINDOWS[1])]


def of(equation: Equation) -> str:
    return f"{equation.name} {[v.type.shape for v in equation.inputs]}"


@pytest.mark.parametrize("equation", [*PRODUCTS, *CONVOLUTIONS], ids=of)
def test_parts_of_a_large_result_equal_the_same_parts_of_the_whole(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = arguments(equation, gradients=False)
    (whole,), (index,) = expected(equation, arrays)
    assert index == ()
    assert whole.shape == equation.outputs[0].type.shape
    assert whole.dtype == np.float64
    monkeypatch.setattr(measuring, "MAX_FLOPS", 1)
    (part,), (index,) = expected(equation, arrays)
    np.testing.assert_allclose(part, whole[index], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("equation", PRODUCTS, ids=of)
def test_parts_include_the_first_and_the_last_row(equation: Equation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MAX_FLOPS", 1)
    (part,), ((*others, rows),) = expected(equation, arguments(equation, gradients=False))
    m = equation.outputs[0].type.shape[-2]
    assert (rows[0], rows[-1]) == (0, m - 1)
    assert len(rows) == min(m, measuring.PARTS) == part.shape[-2]
    assert others == [slice(None)] * (part.ndim - 2)


def test_the_reference_rounds_no_operand() -> None:
    a, b = (np.full(shape, 1 + 2.0**-20, np.float32) for shape in ((2, 3), (3, 2)))
    ((found,), _) = expected(matmul((2, 3), (3, 2), precision="bfloat16"), [a, b])
    np.testing.assert_array_equal(found, np.full((2, 2), 3 * (1 + 2.0**-20) ** 2))


def test_all_outputs_of_an_equation_with_several_are_computed() -> None:
    equation = equation_of(standardize_p, [(4, 5)], axes=(0,), eps=1e-5)
    results, parts = expected(equation, arguments(equation, gradients=False))
    assert len(results) > 1
    assert [x.shape for x in results] == [v.type.shape for v in equation.outputs]
    assert parts == [()] * len(equation.outputs)


def test_results_in_bfloat16_are_compared_as_numbers() -> None:
    """A result that is rounded to the other neighbour is right. One that is off by more is wrong."""
    equation = equation_of(standardize_p, [(4, 5)], axes=(0,), eps=1e-5)
    arrays = equation.inputs[0], equation.outputs[0]
    equation = in_bfloat16(equation, {v: v.like(narrowed(v.type)) for v in arrays})
    given = arguments(equation, gradients=False)
    found, _ = expected(equation, given)
    assert [x.dtype for x in found] == [np.float32] * 3
    y, mean, variance = equation.primitive.reference(*given, **equation.params)
    for step, right in ((1, True), (4, False)):
        other = [widened(x) for x in (y + np.uint16(step), mean, variance)]
        assert agree(other, found, tolerance(equation)) is right


@pytest.mark.parametrize("terms", ["bf16x2", "bf16x3"])
def test_operands_of_several_terms_are_sums_of_float32_numbers(terms: str) -> None:
    window, count = Window((1, 1), (1, 1), (1, 1), 1), TERMS[terms]
    shapes = [(2, 5, 6, 16)] * count + [(8, 3, 3, 16)] * count
    equation = equation_of(
        PRIMITIVES[f"conv2d_{terms}"], shapes, ["uint16"] * 2 * count, window=window, precision=terms
    )
    arrays = arguments(equation, gradients=False)
    assert [(x.shape, x.dtype) for x in arrays] == [v.type for v in equation.inputs]
    first, second = widened(arrays[0]), widened(arrays[1])
    assert 0 < np.abs(second).max() <= 2.0**-8 * np.abs(first).max()
    right, _ = expected(equation, arrays)
    wrong, _ = expected(equation, [x if i != 1 else np.zeros_like(x) for i, x in enumerate(arrays)])
    assert not agree(wrong, right, tolerance(equation))


def test_arguments_are_the_same_each_time() -> None:
    for gradients in (False, True):
        for x, y in zip(*(arguments(PRODUCTS[0], gradients) for _ in range(2)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_gradient_like_arguments_are_small_and_sparse_and_of_many_magnitudes() -> None:
    x, _ = arguments(matmul((500, 400), (400, 3)), gradients=True)
    magnitudes = np.abs(x[x != 0])
    assert x.dtype == np.float32
    assert 0.45 < np.mean(x == 0) < 0.55
    assert 0.5e-6 < np.median(magnitudes) < 2e-6
    assert np.quantile(magnitudes, 0.99) > 1000 * np.quantile(magnitudes, 0.01)
    assert 0.45 < np.mean(x[x != 0] > 0) < 0.55


@pytest.mark.parametrize(
    ("equation", "length"),
    [
        (equation_of(argmax_p, [(3, 4)], axis=1), None),
        (equation_of(take_p, [(40, 7), (1000,)], ("float32", "int64"), axis=0), 40),
        (equation_of(scatter_along_axis_p, [(3, 900), (3, 900)], ("float32", "int64"), axis=1, length=11), 11),
    ],
)
def test_integer_arguments_are_valid_indices(equation: Equation, length: int | None) -> None:
    integers = [x for x in arguments(equation, gradients=True) if x.dtype.kind == "i"]
    assert len(integers) == (length is not None)
    for x in integers:
        assert (x.min(), x.max()) == (0, length and length - 1)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a @ b


def without_the_last_term(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[:, :-1] @ b[:-1]


def in_float16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The high and low half of each operand in float16, unscaled: precise enough for normal numbers only."""

    def split(x: np.ndarray) -> np.ndarray:
        high = x.astype(np.float16)
        return high.astype(np.float64) + (x - high).astype(np.float16)

    return (split(a) @ split(b)).astype(np.float32)


class Trial:
    """Candidates that NumPy computes, by the names of their kernels; see `measure.Trial`."""

    def __init__(self, equation: Equation, functions: Sequence[Callable[..., np.ndarray]], gradients: bool) -> None:
        self.equation, self.arrays = equation, arguments(equation, gradients)
        self.functions = {f.__name__: f for f in functions}

    def expected(self) -> Sequence[np.ndarray]:
        results, self.parts = expected(self.equation, self.arrays)
        return results

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        assert isinstance(kernel, CudaKernel)
        return [self.functions[kernel.launches[0].name](*self.arrays)[self.parts[0]]]

    def microseconds(self, kernel: Candidate) -> float:
        return 1.0


@pytest.mark.parametrize("limit", [1, measuring.MAX_FLOPS], ids=["parts", "whole"])
@pytest.mark.parametrize("wrong", [without_the_last_term, in_float16])
def test_a_wrong_first_candidate_is_found_by_the_reference(
    wrong: Callable[..., np.ndarray], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MAX_FLOPS", limit)
    equation = matmul((64, 96), (96, 32))
    assert equation.primitive is matmul_p
    functions = [wrong, exact]
    kernels = [CudaKernel((CudaLaunch("gemm/gemm.cu", f.__name__, blocks=1),)) for f in functions]
    trials = [Trial(equation, functions, gradients) for gradients in (False, True)]
    assert list(measure(equation, kernels, trials)) == [kernels[1].label]


def test_a_split_that_underflows_on_gradients_passes_the_trial_on_normal_numbers() -> None:
    """So only the trial on gradients finds the error."""
    equation = matmul((64, 96), (96, 32))
    kernels = [CudaKernel((CudaLaunch("gemm/gemm.cu", in_float16.__name__, blocks=1),))]
    assert len(measure(equation, kernels, [Trial(equation, [in_float16], gradients=False)])) == 1
    assert not measure(equation, kernels, [Trial(equation, [in_float16], gradients=True)])


def test_bfloat16_arguments_are_normal_numbers_cut_to_16_bits() -> None:
    bits = [Variable(ArrayType(shape, np.dtype(np.uint16)), "gpu") for shape in ((70, 30), (30, 50))]
    out = Variable(ArrayType((70, 50), np.dtype(np.float32)), "gpu")
    params = {"transpose_a": False, "transpose_b": False, "precision": "bfloat16"}
    arrays = arguments(Equation(matmul_bfloat16_p, tuple(bits), params, (out,)), gradients=False)
    for values in map(from_bfloat16_p.reference, arrays):
        assert 0.9 < values.std() < 1.1
