"""Containers: names, scopes, random streams, state, sums and concatenations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import nn, ops
from adtrain.core import tree
from adtrain.core.trace import Call, Hook, hook

FLOAT32 = np.dtype(np.float32)
MODEL = nn.Sequential(
    nn.Residual(nn.Sequential(nn.Linear(6), nn.BatchNorm1d()), shortcut=nn.Linear(6, bias=False)),
    nn.Concat(nn.Linear(2), nn.Sequential(nn.ReLU(), nn.Linear(3))),
    nn.ReLU(),
    nn.Linear(4),
)


def init(model: nn.Module, shape: nn.Shape, seed: int = 0) -> tuple[nn.Params, nn.State]:
    return model.init(shape, np.random.default_rng(seed), FLOAT32)


def test_trees_have_paths_for_children_with_arrays_only() -> None:
    params, state = init(MODEL, (5,))
    assert tree.paths(params) == [
        "0.body.0.weight", "0.body.0.bias", "0.body.1.weight", "0.body.1.bias", "0.shortcut.weight",
        "1.0.weight", "1.0.bias", "1.1.1.weight", "1.1.1.bias", "3.weight", "3.bias",
    ]  # fmt: skip
    assert tree.paths(state) == ["0.body.1.running_mean", "0.body.1.running_var"]
    assert list(MODEL.parameter_shapes((5,))) == tree.paths(params)


def test_describe_has_one_row_per_layer_in_execution_order() -> None:
    assert nn.describe(MODEL, (5,)) == [
        ("0.body.0", "linear", (6,), 36),
        ("0.body.1", "batch_norm1d", (6,), 12),
        ("0.shortcut", "linear", (6,), 30),
        ("1.0", "linear", (2,), 14),
        ("1.1.0", "relu", (6,), 0),
        ("1.1.1", "linear", (3,), 21),
        ("2", "relu", (5,), 0),
        ("3", "linear", (4,), 24),
    ]


class Scopes(Hook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def before(self, call: Call) -> None:
        if call.scope not in self.seen:
            self.seen.append(call.scope)

    def after(self, call: Call) -> None:
        pass


def test_operations_run_in_the_scope_of_their_layer() -> None:
    params, state = init(MODEL, (5,))
    scopes = Scopes()
    with hook(scopes):
        MODEL.forward(params, state, ad.array(np.ones((3, 5), np.float32)), nn.Mode(training=True))
    assert scopes.seen == [
        "0.residual.body.0.linear", "0.residual.body.1.batch_norm1d", "0.residual.shortcut", "0.residual",
        "1.concat.0.linear", "1.concat.1.sequential.0.relu", "1.concat.1.sequential.1.linear", "1.concat",
        "2.relu", "3.linear",
    ]  # fmt: skip


def test_residual_adds_its_input_or_its_shortcut() -> None:
    x = ad.array([[1.0, -2.0]])
    mode = nn.Mode(training=False)
    y, _ = nn.Residual(nn.ReLU()).forward({}, {}, x, mode)
    np.testing.assert_array_equal(y, [[2.0, -2.0]])
    y, _ = nn.Residual(nn.ReLU(), shortcut=nn.LeakyReLU(0.5)).forward({}, {}, x, mode)
    np.testing.assert_array_equal(y, [[2.0, -1.0]])


@pytest.mark.parametrize(
    ("join", "expected"),
    [(nn.Concat, [[1.0, 0.0, 1.0, -1.0]]), (nn.Add, [[2.0, -1.0]]), (nn.Multiply, [[1.0, 0.0]])],
)
def test_concat_and_add_join_the_outputs_of_their_branches(join: Any, expected: list[list[float]]) -> None:
    model = join(nn.ReLU(), nn.LeakyReLU(0.5))
    y, _ = model.forward({}, {}, ad.array([[1.0, -2.0]]), nn.Mode(training=False))
    np.testing.assert_array_equal(y, expected)


def test_training_returns_new_state_and_does_not_change_the_old_one() -> None:
    params, state = init(MODEL, (5,))
    before = [x.numpy().copy() for x in tree.leaves(state)]
    x = ad.array(np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32))
    _, new = MODEL.forward(params, state, x, nn.Mode(training=True))
    assert tree.paths(new) == tree.paths(state)
    for old, x_before, x_new in zip(tree.leaves(state), before, tree.leaves(new), strict=True):
        np.testing.assert_array_equal(old, x_before)
        assert (x_new.numpy() != x_before).any()
    _, evaluated = MODEL.forward(params, new, x, nn.Mode(training=False))
    for a, b in zip(tree.leaves(new), tree.leaves(evaluated), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout2d_drops_whole_channels_and_keeps_the_mean() -> None:
    x = ad.array(np.ones((50, 40, 2, 3)))
    layer, rng = nn.Dropout2d(0.25), ops.rng_state(0)
    y = layer.forward({}, {}, x, nn.Mode(training=True, rng=rng))[0].numpy()
    assert set(np.unique(y)) == {0.0, 1 / 0.75}
    assert (y == y[:, :, :1, :1]).all()
    assert abs(y.mean() - 1) < 0.05
    assert layer.forward({}, {}, x, nn.Mode(training=False))[0] is x


def test_each_dropout_layer_has_its_own_reproducible_mask() -> None:
    model = nn.Concat(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    x = ad.array(np.ones((4, 100), np.float32))

    def masks(step: int) -> list[np.ndarray]:
        y, _ = model.forward({}, {}, x, nn.Mode(training=True, rng=ops.rng_state(7, step)))
        return np.split(y.numpy(), 2, axis=1)

    first, second = masks(0)
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first != second).any()
    np.testing.assert_array_equal(masks(0), [first, second])
    assert (masks(1)[0] != first).any()
    y, _ = model.forward({}, {}, x, nn.Mode(training=False))
    np.testing.assert_array_equal(y, np.ones((4, 200)))


def test_a_seed_gives_the_same_network_in_float32_and_float64() -> None:
    single = tree.leaves(init(MODEL, (5,))[0])
    double = tree.leaves(MODEL.init((5,), np.random.default_rng(0), np.dtype(np.float64))[0])
    other = tree.leaves(init(MODEL, (5,), seed=1)[0])
    for a, b in zip(single, double, strict=True):
        np.testing.assert_array_equal(a, b.numpy().astype(np.float32))
    assert (single[0].numpy() != other[0].numpy()).any()


def test_containers_compare_and_hash_by_value_and_accept_lists() -> None:
    assert nn.Sequential(nn.ReLU(), nn.Linear(2)) == nn.Sequential(nn.ReLU(), nn.Linear(2))
    assert hash(nn.Sequential(nn.ReLU())) == hash(nn.Sequential(nn.ReLU()))
    y, _ = nn.Sequential().forward({}, {}, ad.array([[1.0]]), nn.Mode(training=False))
    assert y.item() == 1.0
