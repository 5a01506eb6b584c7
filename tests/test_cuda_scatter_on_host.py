"""The kernels of `scatter_add` that sort positions by index, emulated on the CPU, against the NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_host import Host, host

from adtrain.backends.cuda import H200
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.ops.index import scatter_add_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("shape", "axis", "length", "repeats", "dtype"),
    [
        ((7, 300), 1, 270, "few", "float32"),
        ((7, 300), 1, 270, "many", "int32"),
        ((2, 1300, 8), 1, 300, "few", "float32"),
    ],
)
def test_each_kernel_adds_the_elements_of_equal_indices(
    host: Host, shape: tuple[int, ...], axis: int, length: int, repeats: str, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    count = shape[axis]
    indices = rng.integers(0, length, count) if repeats == "few" else rng.integers(0, 3, count) ** 2
    ct = rng.integers(-9, 9, shape).astype(dtype)  # sums are exact in any order
    equation = Equation(
        scatter_add_p,
        (Variable(ArrayType(shape, ct.dtype), "gpu"), Variable(ArrayType((count,), indices.dtype), "gpu")),
        {"axis": axis, "length": length},
        (Variable(ArrayType((*shape[:axis], length, *shape[axis + 1 :]), ct.dtype), "gpu"),),
    )
    target = H200._replace(multiprocessors=4)
    kernels = cuda_kernels("scatter_add", target, *(v.type for v in equation.inputs), axis=axis, length=length)
    assert len(kernels) == 2
    expected = scatter_add_p.reference(ct, indices, axis=axis, length=length)
    for kernel in kernels:
        if len(kernel.launches) > 1:
            np.testing.assert_array_equal(host.computed(equation, kernel, [ct, indices])[0], expected)


def test_a_member_with_its_own_indices_has_the_same_bytes_among_others(host: Host) -> None:
    """The positions of all members are one axis, and segments divide those of each member."""
    rng, members, length, count = np.random.default_rng(0), 3, 5, 96
    indices = rng.integers(0, length, (members, count))
    ct = rng.normal(size=(members, count, 4)).astype(np.float32)

    def computed(chosen: list[int]) -> np.ndarray:
        ids = indices[chosen] + np.arange(len(chosen))[:, None] * length
        given = [ct[chosen], ids]
        types = [ArrayType(x.shape, x.dtype) for x in given]
        output = ArrayType((len(chosen) * length, 4), ct.dtype)
        params = {"axis": 0, "length": len(chosen) * length}
        kernel, *_ = cuda_kernels("scatter_add", H200._replace(by_member=True), *types, **params)
        inputs = tuple(Variable(t, "gpu") for t in types)
        (found,) = host.computed(Equation(scatter_add_p, inputs, params, (Variable(output, "gpu"),)), kernel, given)
        expected = scatter_add_p.reference(ct[chosen].astype(float), ids, **params)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        return found[-length:]

    assert computed([0, 1, 2]).tobytes() == computed([2]).tobytes()
