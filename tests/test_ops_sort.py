"""sort, argsort and topk: the order is stable and NaN is larger than every number, eager, compiled and in CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled_parity import check_all
from cuda_on_host import Host, host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.ops.rearrange import argsort_p

__all__ = ["host"]

ELEMENTS = {
    "float32": (0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan),
    "float64": (0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan),
    "int64": (0, 1, -1, 2**63 - 1, -(2**63)),
    "int32": (0, 1, -1, 2**31 - 1, -(2**31)),
    "uint8": (0, 1, 255),
    "uint32": (0, 1, 2**32 - 1),
    "bool": (False, True),
}
"""So few elements that many of a sample are equal."""


def repeated(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(shape).choice(np.array(ELEMENTS[dtype], dtype), shape)


@pytest.mark.needs_torch
@given(
    x=st.sampled_from(["float64", "int64", "uint8", "bool"]).flatmap(
        lambda dtype: arrays.arrays(
            dtype, arrays.array_shapes(max_dims=3, min_side=0, max_side=20), elements=st.sampled_from(ELEMENTS[dtype])
        )
    ),
    last=st.booleans(),
    descending=st.booleans(),
)
def test_equal_elements_keep_their_order_as_in_a_stable_sort_of_pytorch(
    x: np.ndarray, last: bool, descending: bool
) -> None:
    torch = pytest.importorskip("torch")
    axis = -1 if last else 0
    values, indices = torch.sort(torch.tensor(x), dim=axis, stable=True, descending=descending)
    np.testing.assert_array_equal(ops.argsort(x, axis, descending).numpy(), indices.numpy())
    np.testing.assert_array_equal(ops.sort(x, axis, descending).numpy(), values.numpy())
    k = x.shape[axis] // 2
    for found, expected in zip(ops.topk(x, k, axis, largest=descending), (values, indices), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.narrow(axis, 0, k).numpy())


def test_the_gradient_of_equal_elements_goes_to_the_first_ones() -> None:
    x = np.array([2.0, 1.0, 2.0, 2.0])
    weights = np.array([1.0, 10.0, 100.0, 1000.0])
    assert ad.grad(lambda x: (ops.sort(x) * weights).sum())(x).numpy().tolist() == [10, 1, 100, 1000]
    assert ad.grad(lambda x: (ops.sort(x, descending=True) * weights).sum())(x).numpy().tolist() == [1, 1000, 10, 100]
    assert ad.grad(lambda x: (ops.topk(x, 2)[0] * weights[:2]).sum())(x).numpy().tolist() == [1, 0, 10, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.sort(x, 2), "sort: axis 2 is out of range for an array of 2 dimensions"),
        (lambda x: ops.argsort(x[0, 0]), "argsort: axis -1 is out of range for an array of 0 dimensions"),
        (lambda x: ops.topk(x, 4), "topk: found k = 4, expected 0 to 3, the length of axis 1"),
        (lambda x: ops.topk(x, -1, 0), "topk: found k = -1, expected 0 to 2, the length of axis 0"),
    ],
)
def test_an_axis_or_k_out_of_range_is_an_error(call: Any, message: str) -> None:
    with pytest.raises(ad.ShapeError, match=message):
        call(ad.array(np.ones((2, 3))))


LENGTHS = (0, 1, 15, 16, 17, 33, 100, 1000)
"""Around the runs that the C kernel sorts by insertion, and for odd and even numbers of merges."""


@pytest.mark.compiled
def test_compiled_order_is_that_of_the_reference() -> None:
    def orders(x: Any) -> Any:
        return [ops.argsort(x), ops.argsort(x, descending=True)]

    def first(x: Any) -> Any:
        return [ops.topk(x, min(k, x.shape[1]))[1] for k in (0, 32, 33)]

    samples = [("float32", n) for n in LENGTHS] + [(dtype, 40) for dtype in ELEMENTS]
    functions: dict[str, Any] = {f"{dtype} {n}": (orders, [repeated(dtype, 3, n)]) for dtype, n in samples}
    functions |= {f"first of {n}": (first, [repeated("float64", 3, n)]) for n in (1, 33, 100)}
    functions["columns"] = (lambda x: (ops.sort(x, 0), ops.topk(x, 3, 0, largest=False)), [repeated("float64", 9, 4)])
    check_all(functions, 0)


@pytest.mark.parametrize("descending", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("dtype", "rows", "length", "launches"),
    [("float32", 3, 1, 1), ("uint8", 5, 33, 1), ("float64", 1, 1024, 1), ("float32", 2, 1025, 2),
     ("int64", 2, 2500, 3), ("float32", 1, 5000, 4)],
)  # fmt: skip
def test_cuda_order_is_that_of_the_reference(
    host: Host, dtype: str, rows: int, length: int, launches: int, descending: bool
) -> None:
    x = repeated(dtype, rows, length)
    for count in {length, min(length, 5), min(length, 1500), 0}:
        params = {"count": count, "descending": descending}
        source, order = ArrayType(x.shape, x.dtype), ArrayType((rows, count), np.dtype(np.int64))
        (kernel,) = cuda_kernels("argsort", H200, source, **params)
        assert len(kernel.launches) == launches
        equation = Equation(argsort_p, (Variable(source, "gpu"),), params, (Variable(order, "gpu"),))
        (found,) = host.computed(equation, kernel, [x])
        np.testing.assert_array_equal(found, argsort_p.reference(x, **params))
