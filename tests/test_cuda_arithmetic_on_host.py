"""Floor division, rounding, powers, products and random numbers as CUDA code, run on the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from test_division import assert_same, special_pairs
from test_integers import pairs
from vendor_equations import equation_of

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda.targets import H200
from adtrain.core.fused import LOOPS, fuse
from adtrain.core.registry import cuda_kernels
from adtrain.core.staging import stage
from adtrain.ops.matmul import matmul_integers_p

__all__ = ["host"]


def results(a: Any, b: Any) -> list[Any]:
    found = [a // b, a % b, a // 3, 7 % a, ops.isnan(a), ops.isinf(a), ops.isfinite(a)]
    if a.dtype.kind == "f":
        return [*found, ops.floor(a), ops.ceil(a), ops.trunc(a), ops.round(a)]
    return [*found, a**b, a**300]


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_elementwise_arithmetic_on_special_values_is_that_of_numpy(host: Host, dtype: str) -> None:
    a, b = special_pairs(dtype) if dtype == "float32" else pairs(dtype)
    program = stage(results, ()).program(a, b)
    equation = fuse(LOOPS, program.equations, set(program.outputs))
    expected = dict(zip(program.outputs, (x.numpy() for x in results(ad.array(a), ad.array(b))), strict=True))
    known = dict(zip(program.inputs, (a, b), strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    arrays = [known[v] for v in equation.inputs]
    for v, found in zip(equation.outputs, host.computed(equation, None, arrays), strict=True):
        assert_same(found, expected[v])


def test_products_of_integer_matrices_wrap_around(host: Host) -> None:
    equation = equation_of(matmul_integers_p, [(3, 5, 7), (3, 7, 4)], "int32")
    (kernel,) = cuda_kernels("matmul_integers", H200, *(v.type for v in equation.inputs))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-(2**31), 2**31, v.type.shape, np.int32) for v in equation.inputs)
    (found,) = host.computed(equation, kernel, [a, b])
    np.testing.assert_array_equal(found, a @ b)


@pytest.mark.parametrize("count", [5, 8])
def test_random_numbers_of_several_states_are_those_of_numpy(host: Host, count: int) -> None:
    states = np.random.default_rng(0).integers(0, 2**32, (3, 4), np.uint32)
    draw = ad.vmap(lambda state: ops.random_uniform(state, (count,), stream=7))
    (equation,) = stage(draw, ()).program(states).equations
    (found,) = host.computed(equation, None, [states])
    np.testing.assert_array_equal(found, draw(states).numpy())
