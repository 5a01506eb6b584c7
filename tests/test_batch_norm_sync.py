"""Batch normalisation over all shards of a batch: PyTorch's batch norm of the whole batch is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thread_ranks import ThreadRank, on_ranks
from training_runs import write_config

import adtrain as ad
from adtrain import config, nn, ops, training
from adtrain.core import tree
from adtrain.core.errors import AdtrainError

SIZES = (5, 4, 4, 4)
RNG = np.random.default_rng(0)
X, FACTORS = RNG.normal(3.0, 2.0, (2, sum(SIZES), 3, 2, 2))
WEIGHT, BIAS = RNG.normal(size=(2, 3))
MEAN, VARIANCE = np.zeros(3), np.ones(3)


def own(rank: int, x: np.ndarray) -> np.ndarray:
    return np.split(x, np.cumsum(SIZES)[:-1])[rank]


def by_torch() -> list[np.ndarray]:
    """y, both running statistics, the gradients of sum(y * FACTORS), and the gradient of the sum of their squares."""
    torch = pytest.importorskip("torch")
    x, w, b = (torch.tensor(v, requires_grad=True) for v in (X, WEIGHT, BIAS))
    mean, variance = torch.tensor(MEAN), torch.tensor(VARIANCE)
    y = torch.nn.functional.batch_norm(x, mean, variance, w, b, training=True)
    first = torch.autograd.grad((y * torch.tensor(FACTORS)).sum(), (x, w, b), create_graph=True)
    second = torch.autograd.grad((first[0] ** 2).sum(), x)
    return [v.detach().numpy() for v in (y, mean, variance, *first, *second)]


@pytest.mark.needs_torch
def test_values_statistics_and_derivatives_are_those_of_the_whole_batch() -> None:
    def on_one(rank: ThreadRank) -> list[np.ndarray]:
        factors = own(rank.rank, FACTORS)

        def loss(x: Any, w: Any, b: Any) -> tuple[Any, Any]:
            found = ops.batch_norm(x, MEAN, VARIANCE, w, b, shards=SIZES)
            return ops.sum(found[0] * factors), found

        arguments = [ad.array(v) for v in (own(rank.rank, X), WEIGHT, BIAS)]
        first, found = ad.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arguments)

        def squares(x: Any) -> Any:
            return ops.sum(ops.square(ad.grad(lambda x: loss(x, *arguments[1:])[0])(x)))

        return [v.numpy() for v in (*found, *first, ad.grad(squares)(arguments[0]))]

    ranks = on_ranks(len(SIZES), on_one)
    y, mean, variance, x, w, b, second = by_torch()
    for found in ranks:
        np.testing.assert_allclose(found[1], mean, rtol=1e-12)
        np.testing.assert_allclose(found[2], variance, rtol=1e-12)
        np.testing.assert_array_equal(found[1:3], ranks[0][1:3])
    for i, expected in ((0, y), (3, x), (6, second)):
        np.testing.assert_allclose(np.concatenate([found[i] for found in ranks]), expected, rtol=1e-8, atol=1e-10)
    for i, expected in ((4, w), (5, b)):
        np.testing.assert_allclose(sum(found[i] for found in ranks), expected, rtol=1e-9)


def test_a_step_on_shards_equals_a_step_on_the_whole_batch(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    layers = "model.layers=[{linear: 8}, {batch_norm1d: {sync: true}}, relu, {linear: 3}]"
    states = []
    for shards in ("data.shards=1", "data.shards=4"):  # 90 images: all batches have 18, so one step is compiled
        settings = [layers, "data.batch_size=18", "training.steps=1", "optimizer={sgd: {lr: 0.5}}", shards]
        cfg = config.load(path, settings)
        state = training.run(training.prepare(cfg)).state
        states.append(tree.leaves((state.params, state.statistics)))
    for x, y in zip(*states, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=2e-5, atol=1e-6)


def test_shards_outside_of_a_training_step_need_as_many_ranks() -> None:
    layer = nn.BatchNorm1d(sync=True)
    params, state = layer.init((3,))
    with pytest.raises(AdtrainError, match="found 1 ranks and 2 shards, expected one shard per rank"):
        layer.forward(params, state, ad.array(np.ones((4, 3), np.float32)), nn.Mode(training=True, shards=(4, 4)))
