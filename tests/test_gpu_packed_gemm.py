"""The GPU: products in slabs are right for all shapes, and as exact as plain float32 whatever the numbers are."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_gemm_emulated import NOISE, OF_HALVES, errors, hard
from test_gpu_products import adversarial, computed, distance, exact, operands, rounded

from adtrain import ops
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel
from adtrain.core.staging import stage
from adtrain.lowering.cuda.gemm.matmul import Product
from adtrain.lowering.cuda.gemm.packed import CAPABILITY, SLABS, SlabProduct, Slabs
from adtrain.lowering.cuda.gemm.tiles import TILES
from adtrain.ops.matmul import matmul_p
from adtrain.passes import ALL

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = {"full": 5e-7, "tf32": 1e-5, "bfloat16": 1e-5}
"""Of the norm of the difference over that of sums of so many such products that do not cancel, operands rounded
beforehand: K up to 1500, where a chain of multiply-adds is 8e-7 off, and results down to a single element."""
EACH = tuple((precision, slabs) for precision, several in SLABS.items() for slabs in several)
M, N, K = 256, 192, SLABS["full"][0].least


@pytest.fixture(autouse=True)
def hopper(gpu: Any) -> None:
    if gpu.device.device.compute_capability() != CAPABILITY:
        pytest.skip("there are slabs on GPUs of compute capability 9.0 alone")


Lengths: TypeAlias = "tuple[int, int, int, int]"
"""Batch, M, N and K."""


def in_slabs(shape: Lengths, slabs: Slabs = SLABS["full"][0], ta: bool = False, tb: bool = False) -> CudaKernel:
    return SlabProduct(shape, slabs, (ta, tb)).kernel()


def plain(shape: Lengths) -> CudaKernel:
    """One chain of multiply-adds for each element."""
    return Product(shape, 4, TILES[4][0], 1, (False, False)).kernel()


def multiplied(gpu: Any, kernel: CudaKernel, a: np.ndarray, b: np.ndarray, ta: bool = False, tb: bool = False) -> Any:
    return computed(gpu, matmul_p, kernel, [a, b], transpose_a=ta, transpose_b=tb)


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(("precision", "slabs"), EACH)
@settings(max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 400), st.integers(1, 600), st.integers(1, 1500)))
def test_products_of_all_shapes_are_right(
    gpu: Any, shape: Lengths, precision: str, slabs: Slabs, ta: bool, tb: bool
) -> None:
    """640 in all."""
    a, b = operands(shape, ta, tb, "float32")
    found = multiplied(gpu, in_slabs(shape, slabs, ta, tb), a, b, ta, tb)
    a, b = rounded(a, precision).astype(float), rounded(b, precision).astype(float)
    size = np.linalg.norm(np.sqrt(exact(a * a, b * b, ta, tb)))
    assert np.linalg.norm(found - exact(a, b, ta, tb)) < TOLERANCE[precision] * size


@pytest.mark.parametrize("slabs", SLABS["full"])
def test_a_block_goes_from_tile_to_tile(gpu: Any, slabs: Slabs) -> None:
    shape = (3, 1030, 1500, 140)
    a, b = operands(shape, False, False, "float32")
    assert distance(multiplied(gpu, in_slabs(shape, slabs), a, b), exact(a, b, False, False)) < TOLERANCE["full"]


@pytest.mark.parametrize("case", [*adversarial(M, N, K), *hard(M, N, K)])
def test_products_in_slabs_are_as_exact_as_one_chain_of_multiply_adds(gpu: Any, case: str) -> None:
    a, b = (x.astype(np.float32) for x in {**adversarial(M, N, K), **hard(M, N, K)}[case])
    slabs, chain = (
        errors(multiplied(gpu, kernel((1, M, N, K)), a[None], b[None])[0], a, b) for kernel in (in_slabs, plain)
    )
    assert slabs[0] <= max(NOISE * chain[0], OF_HALVES)
    assert slabs[1] <= NOISE * chain[1]


def test_infinity_and_nan_go_where_they_go_in_plain_sums(gpu: Any) -> None:
    a, b = operands((1, M, N, K), False, False, "float32")
    a[0, 0, 0], a[0, 1, 7], a[0, 130, 9], b[0, 5, 3] = np.inf, np.nan, -np.inf, np.inf
    a[0, 4] = 0
    with np.errstate(all="ignore"):
        expected = np.matmul(a, b)
    for _, slabs in EACH:
        found = multiplied(gpu, in_slabs((1, M, N, K), slabs), a, b)
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(found), test(expected))


def test_results_that_float32_cannot_hold_are_infinite(gpu: Any) -> None:
    a, b = np.full((1, M, K), 1e25, np.float32), np.full((1, K, N), 1e15, np.float32)
    assert np.isposinf(multiplied(gpu, in_slabs((1, M, N, K)), a, b)).all()


@pytest.mark.parametrize("off", [1.0, 1e-4])
@pytest.mark.parametrize("slabs", SLABS["full"])
def test_a_fused_product_is_done_to_each_element_once(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, slabs: Slabs, off: float
) -> None:
    """Of the first tiles one is computed again as a whole, another by its list; where products cancel, all are."""
    rng = np.random.default_rng(0)
    weight, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, N), (M, K), (K, N)))
    a[:, 1::2] = -a[:, ::2] * (1 + off * rng.standard_normal((M, K // 2)))
    b[1::2] = b[::2]
    a[3, 7] = np.inf
    monkeypatch.setitem(cast(Any, matmul_p.implementations), "cuda", in_slabs((1, M, N, K), slabs))
    update = stage(lambda weight, a, b: weight - 0.5 * ops.matmul(a, b), ALL, donate=(0,))
    found = update(*(array(x, device="gpu") for x in (weight, a, b))).numpy()
    expected = weight - 0.5 * exact(a, b, False, False)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.sqrt(K))
