"""Floor division, rounding, powers, products and random numbers as CUDA code, run on the CPU, against NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from test_division import assert_same, special_pairs
from test_integers import pairs
from vendor_equations import equation_of

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.compiler import Source
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import LOOPS, fuse
from adtrain.core.staging import stage
from adtrain.ops.matmul import matmul_integers_p

__all__ = ["host"]

HALVES = """
extern "C" void to_floats(const uint16_t *halves, float *floats, int count)
{
    for (int i = 0; i < count; i++) floats[i] = float_of_half(halves[i]);
}
extern "C" void to_halves(const float *floats, uint16_t *halves, int count)
{
    for (int i = 0; i < count; i++) halves[i] = half_of(floats[i]);
}
"""


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


def test_the_halves_of_the_emulation_are_those_of_numpy(host: Host) -> None:
    library = host.library(Source("halves", ""), [HALVES], 1)
    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = halves.view(np.float16).astype(np.float32)
    exact = np.sort(np.append(floats[np.isfinite(floats)], np.array([-65536, 65536, -1e-30, 1e-30], np.float32)))
    middles = exact[:-1] / 2 + exact[1:] / 2
    near = [np.nextafter(x, y) for x in (exact, middles) for y in (np.float32(-np.inf), x, np.float32(np.inf))]
    numbers = np.concatenate([*near, np.array([-np.inf, np.inf], np.float32)])
    found, packed = np.empty_like(floats), np.empty(len(numbers), np.uint16)
    for function, given, result in ((library.to_floats, halves, found), (library.to_halves, numbers, packed)):
        function(ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(result.ctypes.data), len(given))
    np.testing.assert_array_equal(found, floats)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(packed, numbers.astype(np.float16).view(np.uint16))
