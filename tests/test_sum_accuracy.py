"""The error of sums hardly grows with the number of elements, whatever the axis, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from program_samples import ALL

import adtrain as ad
from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.staging import stage

COUNT = 1_000_000
BOUND = 4 * float(np.finfo(np.float32).eps) * np.log2(COUNT)
"""The maximum of the error divided by the sum of magnitudes."""

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
    "cross-entropy": (
        lambda x: ops.cross_entropy(x, ops.zeros(len(x), np.int32, x.device)),
        lambda x: (np.log(np.exp(x).sum(1)) - x[:, 0]).mean(),
        (COUNT // 4, 4),
    ),
    "product": (lambda x: ops.matmul(ops.transpose(x), x), lambda x: x.T @ x, (COUNT // 4, 4)),
    "product of a vector and a matrix": (
        lambda x: ops.matmul(ops.ones(len(x), device=x.device), x),
        lambda x: x.sum(0),
        (COUNT // 4, 4),
    ),
    "product of a matrix and a vector": (
        lambda x: ops.matmul(ops.transpose(x), ops.ones(len(x), device=x.device)),
        lambda x: x.sum(0),
        (COUNT // 4, 4),
    ),
    "gradient of the weight of a linear layer": (
        lambda x: ad.grad(lambda w: ops.sum(ops.matmul(x, w)))(ops.ones((4, 3), device=x.device)),
        lambda x: np.repeat(x.sum(0)[:, None], 3, 1),
        (COUNT // 4, 4),
    ),
    "gradient of the weight of a convolution": (
        lambda x: ad.grad(lambda w: ops.sum(ops.conv2d(x, w)))(ops.ones((2, 2, 3, 3), device=x.device)),
        lambda x: np.array(
            [[[x[:, c, i : i + 6, j : j + 6].sum() for j in range(3)] for i in range(3)] for c in (0, 1)]
        ),
        (COUNT // 128, 2, 8, 8),
    ),
    "gradient of the bias of a convolution": (
        lambda x: ad.grad(lambda b: ops.sum(x * ops.relu(ops.conv2d(x, ops.ones((2, 2, 1, 1), device=x.device), b))))(
            ops.ones(2, device=x.device)
        ),
        lambda x: x.sum((0, 2, 3)),
        (COUNT // 128, 2, 8, 8),
    ),
    "gradients of batch norm": (
        lambda x: ad.grad(
            lambda w, b: ops.sum(ops.square(ops.batch_norm(x, 0 * w, w, w, b, training=True)[0])), argnums=(0, 1)
        )(ops.ones(4, device=x.device), ops.ones(4, device=x.device))[1],
        lambda x: np.full(4, 2.0 * len(x)),
        (COUNT // 4, 4),
    ),
    "gradient of the bias of layer norm": (
        lambda x: ad.grad(lambda b: ops.sum(ops.square(ops.layer_norm(x, (4,), None, b))))(
            ops.ones(4, device=x.device)
        ),
        lambda x: 2 * (1 + normalised(x)).sum(0),
        (COUNT // 4, 4),
    ),
    "gradient of an embedding": (
        lambda x: ad.grad(lambda w: ops.sum(x * ops.embedding(ops.zeros(len(x), np.int32, x.device), w)))(
            ops.ones((2, 4), device=x.device)
        )[0],
        lambda x: x.sum(0),
        (COUNT // 4, 4),
    ),
    "gradient of an embedding of many rows": (
        lambda x: ad.grad(lambda w: ops.sum(x * ops.embedding(ops.zeros(len(x), np.int32, x.device), w)))(
            ops.ones((70_000, 4), device=x.device)
        )[0],
        lambda x: x.sum(0),
        (COUNT // 4, 4),
    ),
    "average pooling": (lambda x: ops.avg_pool2d(x, 500), lambda x: x.mean((2, 3), keepdims=True), (1, 4, 500, 500)),
}


def normalised(x: np.ndarray) -> Any:
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)


def summands(name: str, equal: bool) -> np.ndarray:
    shape = SUMS[name][2]
    return np.full(shape, 0.1, np.float32) if equal else np.random.default_rng(0).random(shape, np.float32)


@cache
def results(equal: bool) -> list[dict[str, np.ndarray]]:
    """All sums: eager, and compiled as one Program without passes and with all of them."""
    given = {name: array(summands(name, equal)) for name in SUMS}

    def all_sums(given: dict[str, Any]) -> dict[str, Any]:
        return {name: f(given[name]) for name, (f, _, _) in SUMS.items()}

    return [tree.map(lambda x: x.numpy(), run(given)) for run in (all_sums, stage(all_sums), stage(all_sums, ALL))]


@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.parametrize(
    "equal", [pytest.param(True, id="equal"), pytest.param(False, id="random", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", SUMS)
def test_the_error_of_a_float32_sum_is_bounded(name: str, equal: bool) -> None:
    expected = SUMS[name][1](summands(name, equal).astype(np.float64))
    for found in results(equal):
        assert np.abs(found[name] / expected - 1).max() <= BOUND


@pytest.mark.compiled
@pytest.mark.parametrize(("rows", "columns", "transposed"), [(4, 5, False), (1, 5, True), (4, 1, True)])
def test_the_error_of_a_product_of_a_million_equal_summands_is_bounded(
    rows: int, columns: int, transposed: bool
) -> None:
    """Rounding errors of equal summands have one sign as long as the sum is between two powers of two."""
    values = np.linspace(0.6, 1.7, rows * columns).astype(np.float32).reshape(rows, columns)
    a = np.tile(values[:, :1] if columns > 1 else values, (1, COUNT))
    b = np.tile(values[:1] if rows > 1 else values, (COUNT, 1))[:, :columns]
    expected = COUNT * np.outer(a[:, 0].astype(np.float64), b[0].astype(np.float64))
    operands = (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)) if transposed else (a, b)

    def product(a: Any, b: Any) -> Any:
        return ops.matmul(a, b, transposed, transposed)

    for run in (product, stage(product, ALL)):
        assert np.abs(run(*operands).numpy() / expected - 1).max() <= BOUND


def test_the_variance_of_numbers_far_from_zero_is_accurate() -> None:
    x = (1e5 + np.random.default_rng(0).standard_normal((50_000, 2))).astype(np.float32)
    expected = x.astype(np.float64).var(0)
    np.testing.assert_allclose(ops.var(x, 0).numpy(), expected, rtol=1e-3)
    y, *_ = ops.batch_norm(x, np.zeros(2, np.float32), np.ones(2, np.float32), training=True)
    assert abs(float(np.mean(y.numpy().astype(np.float64) ** 2)) - 1) < 1e-3
