"""Calls of cuBLASLt and cuDNN, with emulations of the libraries that compute in host memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vendor_emulated import Lt, cublas, cudnn, package
from vendor_equations import PRODUCT, WINDOWS, convolutions, matmul

from adtrain.backends.cuda.vendor import CHOICES, WORKSPACE_ALIGNMENT, Library, LibraryCall, NotOffered
from adtrain.core.errors import DeviceError
from adtrain.core.program import Equation
from adtrain.ops.conv import Window
from adtrain.passes.plan_memory import ALIGNMENT

STREAM = 77


def computed(library: Library, equation: Equation, choice: int, *arrays: np.ndarray) -> np.ndarray:
    """The result of a library's plan, in memory that was NaN before."""
    out = np.full(equation.outputs[0].type.shape, np.nan, arrays[0].dtype)
    addresses = [x.ctypes.data for x in (*arrays, out)]
    LibraryCall(library, equation, choice).enqueue(addresses, WORKSPACE_ALIGNMENT, STREAM)
    return out


@given(
    batch=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    m=st.integers(1, 6), n=st.integers(1, 6), k=st.integers(1, 6),
    ta=st.booleans(), tb=st.booleans(), dtype=st.sampled_from(["float32", "float64"]),
)  # fmt: skip
def test_cublas_computes_row_major_products(
    batch: tuple[int, ...], m: int, n: int, k: int, ta: bool, tb: bool, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((*batch, k, m) if ta else (*batch, m, k)).astype(dtype)
    b = rng.standard_normal((*batch, n, k) if tb else (*batch, k, n)).astype(dtype)
    expected = (a.swapaxes(-1, -2) if ta else a) @ (b.swapaxes(-1, -2) if tb else b)
    found = computed(cublas(Lt()), matmul(a.shape, b.shape, ta, tb, dtype=dtype), 0, a, b)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "precision", "compute"),
    [
        ("float32", "full", "COMPUTE_32F"),
        ("float32", "tf32", "COMPUTE_32F_FAST_TF32"),
        ("float32", "bfloat16", "COMPUTE_32F_FAST_16BF"),
        ("float64", "full", "COMPUTE_64F"),
    ],
)
def test_cublas_computes_in_the_requested_precision(dtype: str, precision: str, compute: str) -> None:
    lt = Lt()
    a, b = np.ones((2, 3), dtype), np.ones((3, 2), dtype)
    computed(cublas(lt), matmul(a.shape, b.shape, dtype=dtype, precision=precision), 0, a, b)
    ((about, _, stream),) = lt.computed
    assert about["compute"].name == compute
    assert stream == STREAM


def test_cublas_is_queried_once_per_problem_with_limits_of_workspace_and_alignment() -> None:
    lt = Lt()
    library = cublas(lt)
    for choice in range(CHOICES):
        for _ in range(2):
            assert library.plan(PRODUCT, choice).workspace == 1000 * choice
    assert lt.questions == 1
    operands = 4 * (64 * 48 + 48 * 32 + 64 * 32)
    assert lt.limits == {"MAX_WORKSPACE_BYTES": (32 << 20) + operands} | {
        f"MIN_ALIGNMENT_{operand}_BYTES": ALIGNMENT for operand in "ABCD"
    }
    library.plan(matmul((64, 48), (48, 32), precision="tf32"), 0)
    assert lt.questions == 2


@pytest.mark.parametrize(
    ("states", "refusal", "count"), [([0], None, 1), ([0, 7, 0], None, 2), ([], "CUBLAS_STATUS_NOT_SUPPORTED", 0)]
)
def test_algorithms_that_cublas_does_not_offer_are_no_candidates(
    states: list[int], refusal: str | None, count: int
) -> None:
    lt = Lt()
    lt.states, lt.refusal = states, refusal
    library = cublas(lt)
    for choice in range(count):
        library.plan(PRODUCT, choice)
    with pytest.raises(NotOffered, match=f"cublasLt 13.1.0 has {count} algorithms"):
        library.plan(PRODUCT, count)


def test_a_library_error_becomes_a_device_error_of_one_line() -> None:
    lt = Lt()
    lt.refusal = "CUBLAS_STATUS_NOT_INITIALIZED (1): no\ncontext"
    with pytest.raises(DeviceError) as caught:
        cublas(lt).plan(PRODUCT, 0)
    assert str(caught.value) == "device gpu: cublasLt 13.1.0: CUBLAS_STATUS_NOT_INITIALIZED (1): no"


@pytest.mark.parametrize(("image", "weight", "window"), WINDOWS)
def test_cudnn_computes_convolutions_and_their_gradients(
    image: tuple[int, ...], weight: tuple[int, ...], window: Window
) -> None:
    front_end = package([((), 0)])
    library = cudnn(front_end)
    rng = np.random.default_rng(0)
    for equation in convolutions(image, weight, window, "tf32"):
        arrays = [rng.standard_normal(v.type.shape).astype(np.float32) for v in equation.inputs]
        expected = equation.primitive.reference(*arrays, **{**equation.params, "precision": "full"})
        np.testing.assert_array_equal(computed(library, equation, 0, *arrays), expected)
    assert front_end.streams == [STREAM] * 3


def test_cudnn_is_no_candidate_for_weight_gradients_in_float32() -> None:
    library = cudnn(package([((), 0)]))
    assert [library.problem(equation) is None for equation in convolutions(*WINDOWS[1])] == [False, False, True]


@pytest.mark.parametrize(("precision", "first"), [("full", 4), ("tf32", 2)])
def test_cudnn_uses_no_engine_that_rounds_more_than_requested_or_is_nondeterministic(
    precision: str, first: int
) -> None:
    plans: list[tuple[tuple[str, ...], int]] = [
        (("NONDETERMINISTIC",), 0), (("TENSOR_CORE", "DOWN_CONVERT_INPUTS"), 0), (("TENSOR_CORE",), 0),
        (("WINOGRAD",), 0), ((), 0),
    ]  # fmt: skip
    front_end = package(plans)
    equation, *_ = convolutions(*WINDOWS[1], precision)
    x, w = (np.ones(v.type.shape, np.float32) for v in equation.inputs)
    computed(cudnn(front_end), equation, 0, x, w)
    assert [index for index, _ in front_end.executed] == [first]


def test_cudnn_plans_fit_the_workspace_limit_and_are_finitely_many() -> None:
    library = cudnn(package([((), 1 << 40), ((), 512)]))
    equation, *_ = convolutions(*WINDOWS[1])
    assert library.plan(equation, 0).workspace == 512
    with pytest.raises(NotOffered, match=r"cudnn 9\.19\.0 has 1 algorithms"):
        library.plan(equation, 1)
    with pytest.raises(NotOffered):
        cudnn(package([], unsupported=True)).plan(equation, 0)


@pytest.mark.parametrize("scratch_at", [4096, 4096 + ALIGNMENT, 4096 + 3 * ALIGNMENT])
def test_the_workspace_is_aligned_and_inside_the_scratch(scratch_at: int) -> None:
    lt = Lt()
    a, b = np.ones((64, 48), np.float32), np.ones((48, 32), np.float32)
    out = np.zeros((64, 32), np.float32)
    call = LibraryCall(cublas(lt), PRODUCT, 2)
    call.enqueue([x.ctypes.data for x in (a, b, out)], scratch_at, STREAM)
    ((_, workspace, _),) = lt.computed
    assert workspace % WORKSPACE_ALIGNMENT == 0
    assert scratch_at <= workspace
    assert workspace + 2000 <= scratch_at + call.scratch
