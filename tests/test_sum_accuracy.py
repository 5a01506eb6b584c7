"""The error of sums hardly grows with the number of elements, whatever the axis, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from program_samples import ALL

import adtrain as ad
from adtrain import ops

COUNT = 1_000_000
BOUND = 4 * float(np.finfo(np.float32).eps) * np.log2(COUNT)
"""Of the error over the sum of magnitudes."""

SUMS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], Any], tuple[int, ...]]] = {
    "all": (ops.sum, np.sum, (COUNT,)),
    "leading axis": (lambda x: ops.sum(x, 0), lambda x: x.sum(0), (COUNT // 4, 4)),
    "outer axes": (lambda x: ops.sum(x, (0, 2)), lambda x: x.sum((0, 2)), (COUNT // 40, 2, 20)),
    "mean": (lambda x: ops.mean(x, 0), lambda x: x.mean(0), (COUNT // 4, 4)),
    "running sum": (ops.cumsum, np.cumsum, (COUNT,)),
    "running sum from the end": (lambda x: ops.cumsum(x, reverse=True), lambda x: x[::-1].cumsum()[::-1], (COUNT,)),
    "running sums of columns": (ops.cumsum, lambda x: x.cumsum(0), (COUNT // 4, 4)),
    "fused with its summands": (lambda x: ops.sum(x * x * 2.0, 0), lambda x: (x * x * 2).sum(0), (COUNT // 4, 4)),
    "gradient of a bias": (
        lambda x: ad.grad(lambda bias: ops.sum(ops.sigmoid(x + bias)))(ops.zeros(4, device=x.device)),
        lambda x: (1 / (2 + np.exp(x) + np.exp(-x))).sum(0),
        (COUNT // 4, 4),
    ),
    "logsumexp": (lambda x: ops.exp(ops.logsumexp(x, 0)), lambda x: np.exp(x).sum(0), (COUNT // 4, 4)),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "random"])
def test_error_of_a_float32_sum(name: str, equal: bool) -> None:
    f, reference, shape = SUMS[name]
    x = np.full(shape, 0.1, np.float32) if equal else np.random.default_rng(0).random(shape, np.float32)
    expected = reference(x.astype(np.float64))
    for run in (f, ad.stage(f), ad.stage(f, ALL)):
        assert np.abs(run(x).numpy() / expected - 1).max() <= BOUND


def test_variance_of_numbers_far_from_zero() -> None:
    x = (1e5 + np.random.default_rng(0).standard_normal((50_000, 2))).astype(np.float32)
    expected = x.astype(np.float64).var(0)
    np.testing.assert_allclose(ops.var(x, 0).numpy(), expected, rtol=1e-3)
    y, *_ = ops.batch_norm(x, np.zeros(2, np.float32), np.ones(2, np.float32), training=True)
    assert abs(float(np.mean(y.numpy().astype(np.float64) ** 2)) - 1) < 1e-3
