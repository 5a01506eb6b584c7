"""Initialisers have the moments, bounds and orthogonality that their papers state."""

from __future__ import annotations

from math import sqrt
from typing import get_args

import numpy as np
import pytest

import adtrain as ad
from adtrain import nn
from adtrain.nn.init import WeightInit

SHAPES = [(300, 200), (40, 30, 5, 3)]
FANS = {(300, 200): (200, 300), (40, 30, 5, 3): (450, 600)}


def draw(name: str, shape: nn.Shape) -> np.ndarray:
    return nn.INITIALIZERS[name](shape, np.random.default_rng(3))


def expected_std(name: str, shape: nn.Shape) -> float:
    fan_in, fan_out = FANS[shape]
    # The variance of N(0, 1) truncated at ±2 is 1 - 2 * 2 φ(2) / (Φ(2) - Φ(-2)).
    truncated = sqrt(1 - 4 * np.exp(-2) / sqrt(2 * np.pi) / 0.954499736)
    return {
        "kaiming": sqrt(2 / fan_in), "xavier": sqrt(2 / (fan_in + fan_out)), "trunc": 0.02 * truncated, "normal": 1.0,
    }[name.split("_")[0]]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(set(nn.INITIALIZERS) - {"orthogonal", "identity", "dirac", "partial_dirac"}))
def test_mean_and_standard_deviation_are_as_expected(name: str, shape: nn.Shape) -> None:
    weight = draw(name, shape)
    std = expected_std(name, shape)
    assert weight.shape == shape
    assert abs(weight.mean()) < 4 * std / sqrt(weight.size)
    assert weight.std() == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["kaiming_uniform", "xavier_uniform"])
def test_uniform_initialisers_fill_their_interval(name: str, shape: nn.Shape) -> None:
    bound = sqrt(3) * expected_std(name, shape)
    assert 0.999 * bound < np.abs(draw(name, shape)).max() <= bound


def test_trunc_normal_is_truncated_at_two_standard_deviations() -> None:
    assert 0.0399 < np.abs(draw("trunc_normal", (300, 200))).max() <= 0.04


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (8, 3, 2, 2), (50, 2, 3, 3), (1, 1)])
def test_orthogonal_has_orthonormal_rows_or_columns(shape: nn.Shape) -> None:
    matrix = draw("orthogonal", shape).reshape(shape[0], -1)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-12)


def test_orthogonal_has_both_signs_equally_often() -> None:
    rng = np.random.default_rng(0)
    corners = [nn.INITIALIZERS["orthogonal"]((2, 2), rng)[0, 0] for _ in range(1000)]
    assert abs(np.mean(np.sign(corners))) < 0.1


@pytest.mark.parametrize("shape", [(4, 4, 3), (6, 4, 3, 3), (3, 5, 2, 4), (5, 2, 3, 3, 3)])
@pytest.mark.needs_torch
def test_dirac_is_that_of_pytorch(shape: nn.Shape) -> None:
    import torch

    np.testing.assert_array_equal(draw("dirac", shape), torch.nn.init.dirac_(torch.empty(shape)).numpy())


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
def test_identity_is_the_unit_matrix(shape: nn.Shape) -> None:
    np.testing.assert_array_equal(draw("identity", shape), np.eye(shape[0], shape[1]))


def test_partial_dirac_passes_each_input_channel_on_and_draws_the_other_filters() -> None:
    weight = draw("partial_dirac", (6, 4, 3, 3))
    np.testing.assert_array_equal(weight[:4], draw("dirac", (4, 4, 3, 3)))
    np.testing.assert_array_equal(weight[4:], draw("kaiming_uniform", (6, 4, 3, 3))[4:])
    np.testing.assert_array_equal(draw("partial_dirac", (3, 4, 3, 3)), draw("dirac", (3, 4, 3, 3)))


def test_the_type_weight_init_lists_every_initialiser() -> None:
    assert get_args(WeightInit) == tuple(nn.INITIALIZERS)


@pytest.mark.parametrize("name", sorted(nn.INITIALIZERS))
def test_a_layer_draws_weights_by_its_weight_init_and_starts_biases_at_zero(name: WeightInit) -> None:
    dtype = np.dtype(np.float64)
    params, _ = nn.Conv2d(6, kernel_size=3, weight_init=name).init((4, 5, 5), np.random.default_rng(3), dtype)
    np.testing.assert_array_equal(params["weight"], draw(name, (6, 4, 3, 3)))
    np.testing.assert_array_equal(params["bias"], np.zeros(6))


def test_default_weights_preserve_signal_variance_through_20_relu_layers() -> None:
    layers = [layer for _ in range(20) for layer in (nn.Linear(256), nn.ReLU())]
    model = nn.Sequential(*layers)
    rng = np.random.default_rng(0)
    params, state = model.init((256,), rng, np.dtype(np.float32))
    x = rng.normal(size=(64, 256)).astype(np.float32)
    y, _ = model.forward(params, state, ad.array(x), nn.Mode(training=False))
    assert 0.2 < np.mean(np.square(y.numpy())) / np.mean(np.square(x)) < 5
