"""Map-reduce kernels on a GPU match the CPU's, for one slice of the columns and for several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from test_map_reduce import FORMULAS, M, N, arguments, cloud, differ, few_pairs, gaussian

import adtrain as ad
from adtrain import ops
from adtrain.core.staging import stage
from adtrain.passes import ALL

__all__ = ["few_pairs", "gpu", "poisoned"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("f", FORMULAS)
def test_values_and_gradients_match_the_cpu(f: Callable[..., Any], dtype: str) -> None:
    given = arguments(f, dtype)
    staged = stage(ad.value_and_grad(f, argnums=(0, 1, 2)), ALL)
    expected, found = staged(*given), staged(*(x.to("gpu") for x in given))
    assert differ(expected, found) < (1e-5 if dtype == "float32" else 1e-12)


def test_gradients_of_gradients_match_the_cpu() -> None:
    def twice(*args: Any) -> Any:
        return ad.grad(lambda *a: ops.sum(ops.square(ad.grad(gaussian)(*a))), argnums=(0, 1, 2))(*args)

    given, staged = arguments(gaussian), stage(twice, ALL)
    assert differ(staged(*given), staged(*(x.to("gpu") for x in given))) < 1e-12


@pytest.mark.parametrize(("rows", "columns"), [(256, 305), (257, 1025), (70_000, 300), (300, 70_001)])
def test_all_numbers_of_rows_and_columns_match_the_cpu(rows: int, columns: int) -> None:
    def near(x: Any, y: Any) -> Any:
        return ops.exp(-ops.square(x[:, None, 0] - y[None, :, 0])) @ y, ops.logsumexp(x @ y.T, axis=0)

    f = stage(near, ALL)
    given = cloud(rows, 0), cloud(columns, 1)
    assert differ(f(*given), f(*(x.to("gpu") for x in given))) < 1e-12


def test_infinities_and_nan_reach_the_results() -> None:
    x, y = (np.random.default_rng(i).normal(size=(n, 1)) for i, n in enumerate((N, M)))
    x[0], x[1], x[2], y[3] = np.inf, -np.inf, np.nan, 0.0

    def f(x: Any, y: Any) -> Any:
        z = x - y.T
        return ops.sum(z, axis=1), ops.max(z, axis=1), ops.min(z, axis=0), ops.logsumexp(z, axis=1)

    on_cpu, on_gpu = ([ad.array(a, device=device) for a in (x, y)] for device in ("cpu", "gpu"))
    for expected, found in zip(stage(f, ALL)(*on_cpu), stage(f, ALL)(*on_gpu), strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12)


def test_many_numbers_for_each_column_match_the_cpu() -> None:
    f = stage(lambda x, y: ops.exp(-ops.sum(ops.square(x[:, None] - y[None]), axis=2)) @ y, ALL)
    given = [ad.array(np.random.default_rng(i).normal(size=(n, 30)) / 5) for i, n in enumerate((N, M))]
    assert differ(f(*given), f(*(x.to("gpu") for x in given))) < 1e-12
