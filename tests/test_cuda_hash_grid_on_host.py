"""The CUDA kernels of the hash encoding, emulated on the CPU, against the NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host

from adtrain.backends.cuda import H200
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda import indexing
from adtrain.ops.hash_grid import grid_levels, hash_grid_add_p, hash_grid_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive


def computed(host: Host, primitive: Any, arrays: list[np.ndarray], **params: Any) -> np.ndarray:
    types = [ArrayType(x.shape, x.dtype) for x in arrays]
    output = primitive.shape(*types, **params)
    inputs = tuple(Variable(t, "gpu") for t in types)
    (kernel,) = cuda_kernels(primitive.name, H200, *types, **params)
    return host.computed(Equation(primitive, inputs, params, (Variable(output, "gpu"),)), kernel, arrays)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("d", "features", "along"), [(2, 2, ()), (3, 4, (1,)), (4, 3, (0, 3)), (1, 1, ())])
def test_kernels_agree_with_the_reference(
    host: Host, d: int, features: int, along: tuple[int, ...], dtype: str
) -> None:
    rng = np.random.default_rng(d)
    levels, rows = grid_levels(d, (1, 3, 8), 64)
    points, table = rng.uniform(-0.1, 1.1, (33, d)).astype(dtype), rng.normal(size=(rows, features)).astype(dtype)
    tolerance: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-5 if dtype == "float32" else 1e-12}
    found = computed(host, hash_grid_p, [points, table, levels], along=along)
    np.testing.assert_allclose(found, hash_grid_p.reference(points, table, levels, along=along), **tolerance)
    ct = rng.normal(size=found.shape).astype(dtype)
    found = computed(host, hash_grid_add_p, [ct, points, levels], rows=rows, along=along)
    expected = hash_grid_add_p.reference(ct, points, levels, rows=rows, along=along)
    np.testing.assert_allclose(found, expected, **tolerance)


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e38])
def test_sums_of_tiny_and_huge_cotangents_are_relative_to_the_largest(host: Host, scale: float) -> None:
    rng = np.random.default_rng(0)
    levels, rows = grid_levels(2, (2,), 16)
    points = rng.uniform(0, 1, (40, 2)).astype(np.float32)
    ct = (rng.uniform(-1, 1, (40, 1, 2)) * scale).astype(np.float32)
    found = computed(host, hash_grid_add_p, [ct, points, levels], rows=rows, along=())
    expected = hash_grid_add_p.reference(ct.astype(float), points.astype(float), levels, rows=rows, along=())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * scale + 2e-45)


def test_the_order_of_the_threads_does_not_change_a_bit(host: Host) -> None:
    rng = np.random.default_rng(0)
    levels, rows = grid_levels(3, (2, 9), 64)
    arrays = [rng.normal(size=(200, 2, 2)).astype(np.float32), rng.uniform(0, 1, (200, 3)).astype(np.float32), levels]
    found = []
    for host.thread_order in (0, 1):
        found.append(computed(host, hash_grid_add_p, arrays, rows=rows, along=()))
    host.thread_order = 0
    assert found[0].tobytes() == found[1].tobytes()


def test_a_cotangent_that_is_not_finite_makes_all_sums_nan(host: Host) -> None:
    levels, rows = grid_levels(2, (2,), 16)
    ct = np.zeros((3, 1, 1), np.float32)
    ct[1] = np.inf
    points = np.full((3, 2), 0.3, np.float32)
    assert np.isnan(computed(host, hash_grid_add_p, [ct, points, levels], rows=rows, along=())).all()


@pytest.mark.parametrize("features", [1, 2])
def test_sums_in_shared_memory_have_the_same_bits(host: Host, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "SHARED_BYTES", 8 * 40)
    monkeypatch.setattr(indexing, "MOST_THREADS", 64)
    rng = np.random.default_rng(0)
    levels, rows = grid_levels(2, (2, 5, 9), 64)  # the last one does not fit
    arrays = [rng.normal(size=(150, 3, features)), rng.uniform(0, 1, (150, 2)), levels]
    found = []
    for few in (1000, 1):
        monkeypatch.setattr(indexing, "MIN_POINTS", few)
        found.append(computed(host, hash_grid_add_p, arrays, rows=rows, along=(1,)))
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], hash_grid_add_p.reference(*arrays, rows=rows, along=(1,)), rtol=1e-12)
