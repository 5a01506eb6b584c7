"""The GPU: products of operands that are bfloat16 in memory are right, and gradients through stored operands too."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, hopper, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_samples import everywhere
from test_gpu_products import distance, exact
from test_narrow_values import NETWORKS, UNIT, error, sample, small_arrays_as_large_ones

from adtrain import ops
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda.codegen.loops import GROUPED_BFLOAT16
from adtrain.backends.cuda.forms.row_fused import LONG_ROWS
from adtrain.core import tree
from adtrain.core.array import array, from_numpy
from adtrain.core.autodiff import grad, value_and_grad
from adtrain.core.kernel import CudaKernel
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.core.types import BITS
from adtrain.lowering.cuda.gemm.bfloat16 import MATRIX_TILES, TILE_K, Bfloat16Product, Bfloat16Tile, bfloat16_gemm
from adtrain.lowering.cuda.gemm.narrow import narrow_products
from adtrain.ops.channels_last import from_bfloat16_p, matmul_bfloat16_p, to_bfloat16_p
from adtrain.passes import ALL

__all__ = ["gpu", "hopper", "poisoned", "small_arrays_as_large_ones"]

pytestmark = pytest.mark.gpu


def test_conversions_round_as_numpy_does(gpu: Any) -> None:
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    x = np.concatenate([high | low for low in (0, 0x7FFF, 0x8000, 0x8001)]).view(np.float32)
    found, expected = bind(to_bfloat16_p, array(x, device="gpu")).numpy(), to_bfloat16_p.reference(x)
    np.testing.assert_array_equal(found[x == x], expected[x == x])
    assert np.isnan(from_bfloat16_p.reference(found[x != x])).all()
    widened = bind(from_bfloat16_p, from_numpy((high >> 16).astype(BITS), "gpu")).numpy()
    np.testing.assert_array_equal(widened.view(np.uint32), high)


def test_a_loss_over_many_classes_of_rounded_scores_is_right(gpu: Any) -> None:
    rng = np.random.default_rng(0)
    bits = to_bfloat16_p.reference(rng.standard_normal((1024, 8192), np.float32) * 4)
    labels = rng.integers(0, 8192, 1024).astype(np.int32)

    def f(bits: Any, labels: Any) -> Any:
        x = bind(from_bfloat16_p, bits)
        value, gradient = value_and_grad(lambda x: ops.cross_entropy(x, labels))(x)
        return value, bind(to_bfloat16_p, gradient), ops.argmax(x, axis=1)

    args = from_numpy(bits, "gpu"), from_numpy(labels, "gpu")
    staged = stage(f, ALL)
    assert LONG_ROWS in {e.form for e in staged.program(*args).equations}
    value, gradient, most = (x.numpy() for x in staged(*args))
    x = from_bfloat16_p.reference(bits).astype(float)
    exact, of_exact = value_and_grad(lambda x: ops.cross_entropy(x, array(labels)))(array(x))
    assert value == pytest.approx(exact.item(), rel=1e-5)
    np.testing.assert_allclose(from_bfloat16_p.reference(gradient), of_exact.numpy(), rtol=2.0**-7)
    np.testing.assert_array_equal(most, x.argmax(1))


eights = st.integers(1, 75).map(lambda n: 8 * n)


@pytest.mark.slow
@pytest.mark.parametrize("tile", MATRIX_TILES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), eights, eights, eights),
    flags=st.tuples(st.booleans(), st.booleans()),
    splits=st.sampled_from([1, 1, 2, 5]),
)
def test_products_of_all_shapes_are_right(
    gpu: Any, tile: Bfloat16Tile, shape: tuple[int, int, int, int], flags: tuple[bool, bool], splits: int
) -> None:
    ta, tb = flags
    splits = min(splits, -(-shape[-1] // TILE_K))
    kernel = bfloat16_gemm(Bfloat16Product(gpu.lowering.target, shape, tile, (ta, not tb), splits))
    check_product(gpu, kernel, shape, ta, tb)


def check_product(gpu: Any, kernel: CudaKernel, shape: tuple[int, int, int, int], ta: bool, tb: bool) -> None:
    """Compare a kernel for a product of these lengths (batch, M, N, K) with float64."""
    batch, m, n, k = shape
    rng = np.random.default_rng(m)
    shapes = ((batch, k, m) if ta else (batch, m, k), (batch, n, k) if tb else (batch, k, n))
    arrays = [to_bfloat16_p.reference(rng.standard_normal(s, np.float32)) for s in shapes]
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "bfloat16"}
    found = run_twice(gpu, matmul_bfloat16_p, kernel, arrays, **params)[0]
    a, b = (from_bfloat16_p.reference(x).astype(float) for x in arrays)
    size = np.linalg.norm(np.sqrt(exact(a * a, b * b, ta, tb)))
    assert np.linalg.norm(found - exact(a, b, ta, tb)) < 1e-5 * size


@pytest.mark.parametrize("flags", [*product((False, True), repeat=2)])
@pytest.mark.parametrize("shape", [(8192, 8, 768), (8, 776, 4104), (3080, 16, 72), (16, 4104, 3072)])
def test_products_of_few_columns_are_right(
    gpu: Any, hopper: None, shape: tuple[int, int, int], flags: tuple[bool, bool]
) -> None:
    (m, n, k), (ta, tb) = shape, flags
    kernel = narrow_products(gpu.lowering.target, [(m, n)], k, (ta, not tb))
    assert kernel is not None
    check_product(gpu, kernel, (1, m, n, k), ta, tb)


def test_gradients_through_stored_operands_are_those_of_rounded_products(gpu: Any) -> None:
    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((1024, 512), (512, 768), (768, 640)))
    bias = rng.standard_normal(768).astype(np.float32)

    def gradients(x: Any, w: Any, v: Any, bias: Any) -> Any:
        def loss(w: Any, v: Any, bias: Any) -> Any:
            with ops.matmul_precision("bfloat16"):
                return ops.mean(ops.square(ops.matmul(ops.relu(ops.matmul(x, w) + bias), v)))

        return grad(loss, (0, 1, 2))(w, v, bias)

    args = [array(y, device="gpu") for y in (x, w, v, bias)]
    staged = stage(gradients, ALL)
    assert "matmul_bfloat16" in {e.name for e in everywhere(staged.program(*args))}
    for found, expected in zip(staged(*args), gradients(*map(array, (x, w, v, bias))), strict=True):
        assert distance(found.numpy(), expected.numpy()) < 3e-3


@pytest.mark.parametrize(
    ("rows", "shapes"),
    [(4100, ((768, 1536), (1536, 776), (264, 2048))), (12300, ((768, 8), (8, 776), (2056, 8)))],
)
def test_weight_gradients_that_share_a_launch_are_right_and_the_same_twice(
    gpu: Any, hopper: None, rows: int, shapes: tuple[tuple[int, int], ...]
) -> None:
    rng = np.random.default_rng(0)
    factors = [rng.standard_normal((rows, n), np.float32) for shape in shapes for n in shape]
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]

    def updated(*arrays: Any) -> Any:
        with ops.matmul_precision("bfloat16"):
            pairs = zip(arrays[:6:2], arrays[1:6:2], arrays[6:], strict=True)
            return [w - 0.1 * ops.matmul(a, b, transpose_a=True) for a, b, w in pairs]

    args = [array(y, device="gpu") for y in (*factors, *weights)]
    staged = stage(updated, ALL)
    assert GROUPED_BFLOAT16 in {e.form for e in staged.program(*args).equations}
    found, again = ([x.numpy() for x in staged(*args)] for _ in range(2))
    for x, y, a, b, w in zip(found, again, factors[::2], factors[1::2], weights, strict=True):
        assert x.tobytes() == y.tobytes()
        a, b = (from_bfloat16_p.reference(to_bfloat16_p.reference(each)).astype(float) for each in (a, b))
        assert distance(x, w - 0.1 * (a.T @ b)) < 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_with_bfloat16_between_kernels_compute_what_the_reference_does(
    gpu: Any, name: str, small_arrays_as_large_ones: None
) -> None:
    """Up to a few roundings: sums have another order, and a number that is rounded the other way changes later ones."""
    network = sample(name)
    with ops.matmul_precision("bfloat16"):
        staged = stage(network.gradients, ALL)
        args = tree.map(lambda x: array(x.numpy(), device="gpu"), network.arguments("float32"))
        program = staged.program(*args)
        runs = [[x.numpy() for x in tree.leaves(staged(*args))] for _ in range(2)]
    assert any(v.type.dtype == BITS for v in program.names)
    on_cpu = replace(program, constants={v: array(x.numpy()) for v, x in program.constants.items()})
    expected = NumpyProgram(on_cpu).run(network.given())[0]
    assert error(runs[0], expected) < 4 * UNIT
    assert abs(runs[0][0] - expected[0]) < UNIT * expected[0]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)
