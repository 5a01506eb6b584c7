"""Initialisers have the moments, bounds and orthogonality that their papers state; `whitening` whitens."""

from __future__ import annotations

import os
from math import sqrt
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from command_line import command
from hypothesis import given
from hypothesis import strategies as st
from sweep_runs import groups
from training_runs import load, prepare, write_config

import adtrain as ad
from adtrain import nn
from adtrain.config import ConfigError
from adtrain.core import tree
from adtrain.core.errors import AdtrainError
from adtrain.gradcheck import check_config
from adtrain.nn.init import BY_ELEMENT, DRAWN_AT_ONCE, INITIALIZERS, WHITENING_EPS, WHOLE, TypesOnly, WeightInit, drawn
from adtrain.training import model_file, network

SHAPES = [(300, 200), (40, 30, 5, 3)]
FANS = {(300, 200): (200, 300), (40, 30, 5, 3): (450, 600)}


def draw(name: str, shape: nn.Shape) -> np.ndarray:
    return drawn(name, shape, np.random.default_rng(3), np.dtype(np.float64)).numpy()


def expected_std(name: str, shape: nn.Shape) -> float:
    fan_in, fan_out = FANS[shape]
    # The variance of N(0, 1) truncated at ±2 is 1 - 2 * 2 φ(2) / (Φ(2) - Φ(-2)).
    truncated = sqrt(1 - 4 * np.exp(-2) / sqrt(2 * np.pi) / 0.954499736)
    return {
        "kaiming": sqrt(2 / fan_in), "xavier": sqrt(2 / (fan_in + fan_out)), "trunc": 0.02 * truncated, "normal": 1.0,
    }[name.split("_")[0]]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(set(INITIALIZERS) - {"orthogonal", "identity", "dirac", "partial_dirac"}))
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


@pytest.mark.parametrize("name", sorted(BY_ELEMENT))
def test_numbers_drawn_in_parts_are_those_drawn_at_once(name: str) -> None:
    shape = (2, DRAWN_AT_ONCE // 2 + 3)
    at_once = BY_ELEMENT[name](shape)(np.random.default_rng(3), 2 * shape[1]) * 0.5
    found = drawn(name, shape, np.random.default_rng(3), np.dtype(np.float32), 0.5)
    np.testing.assert_array_equal(found.numpy(), at_once.astype(np.float32).reshape(shape))


@pytest.mark.parametrize("name", sorted(INITIALIZERS))
def test_the_types_of_weights_take_no_memory(name: str) -> None:
    found = drawn(name, (1 << 20, 1 << 20), TypesOnly(), np.dtype(np.float32))
    assert found.shape == (1 << 20, 1 << 20)
    assert found.dtype == np.float32


def test_trunc_normal_is_truncated_at_two_standard_deviations() -> None:
    assert 0.0399 < np.abs(draw("trunc_normal", (300, 200))).max() <= 0.04


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (8, 3, 2, 2), (50, 2, 3, 3), (1, 1)])
def test_orthogonal_has_orthonormal_rows_or_columns(shape: nn.Shape) -> None:
    matrix = draw("orthogonal", shape).reshape(shape[0], -1)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-12)


def test_orthogonal_has_both_signs_equally_often() -> None:
    rng = np.random.default_rng(0)
    corners = [drawn("orthogonal", (2, 2), rng, np.dtype(np.float64)).numpy()[0, 0] for _ in range(1000)]
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
    assert sorted(get_args(WeightInit)) == sorted({**BY_ELEMENT, **WHOLE})


@pytest.mark.parametrize("name", sorted(INITIALIZERS))
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


def whitening(count: int, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(count, kernel_size=(2, 3), dilation=dilation, bias=False, weight_init="whitening")


def images(count: int = 150) -> np.ndarray:
    """Images whose neighbouring pixels and channels are correlated, with a mean other than 0."""
    noise = np.random.default_rng(1).normal(size=(count, 3, 9, 9))
    return 2.0 + noise + np.roll(noise, 1, axis=3) + np.roll(noise, 1, axis=1)


@pytest.mark.parametrize("dilation", [1, 2])
def test_whitened_patches_have_variance_one_and_no_correlation(dilation: int) -> None:
    x = images()
    params, _ = whitening(36, dilation).init(x.shape[1:], dtype=np.float64, images=x)
    y, _ = whitening(36, dilation).forward(params, {}, ad.array(x), nn.Mode(training=False))
    outputs = y.numpy().transpose(1, 0, 2, 3).reshape(36, -1)
    np.testing.assert_array_equal(outputs[18:], -outputs[:18])
    np.testing.assert_allclose(np.cov(outputs[:18], bias=True), np.eye(18), atol=0.01)


def test_filters_of_whitening_are_eigenvectors_by_falling_eigenvalue_and_their_negatives() -> None:
    x = images()
    weight = whitening(7).init(x.shape[1:], dtype=np.float64, images=x)[0]["weight"].numpy().reshape(7, -1)
    patches = [x[:, :, i : i + 2, j : j + 3].reshape(len(x), -1) for i in range(8) for j in range(7)]
    values, vectors = np.linalg.eigh(np.cov(np.concatenate(patches), rowvar=False, bias=True))
    expected = (vectors / np.sqrt(values + WHITENING_EPS))[:, ::-1].T[:4]
    signs = np.sign(np.sum(weight[:4] * expected, axis=1, keepdims=True))
    np.testing.assert_allclose(weight[:4], signs * expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(weight[4:], -weight[:3])
    assert (weight[np.arange(4), np.abs(weight[:4]).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (whitening(4), None, "conv2d: weight_init whitening needs images: write init(shape, images=...)"),
        (whitening(4), images()[:, :, 1:], "conv2d: images has the shape (150, 3, 8, 9), expected (N, 3, 9, 9)"),
        (whitening(37), images(), "conv2d: out_channels is 37, expected at most 36 with whitening: 2 for each of the "
         "18 numbers of a patch"),
        (whitening(4, 6), images(), "conv2d: weight_init whitening needs patches without padding, but the kernel 7x13 "
         "is larger than the input 9x9"),
    ],
)  # fmt: skip
def test_images_that_do_not_fit_whitening_are_errors(layer: nn.Module, x: np.ndarray | None, message: str) -> None:
    with pytest.raises(AdtrainError) as error:
        layer.init((3, 9, 9), images=x)
    assert str(error.value) == message


CONV = "conv2d: {out_channels: 8, kernel_size: 2, weight_init: whitening}"
LAYERS = f"[{CONV}, flatten, linear: 3]"
SQUARE = "model.input=[1, 6, 6]"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (f"[relu, {CONV}, flatten, linear: 3]", "found weight_init whitening in layer 1, expected it in the first one: "
         "it takes the network's input"),
        (f"[relu, residual: {{body: [{CONV}], shortcut: [{CONV}]}}, flatten, linear: 3]",
         "found weight_init whitening in layer 1, expected it in the first one: it takes the network's input"),
        (LAYERS.replace("8", "9"), "out_channels is 9, expected at most 8 with whitening: 2 for each of the 4 numbers "
         "of a patch"),
        (LAYERS.replace("{", "{groups: 2, "), "weight_init whitening needs groups 1, found groups 2"),
    ],
)  # fmt: skip
def test_whitening_of_a_layer_that_it_does_not_fit_is_an_error_at_the_layer(
    tmp_path: Path, layers: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\[[01]\]") as error:
        prepare(tmp_path, SQUARE, layers=layers)
    assert str(error.value).endswith(message)


def test_a_training_whitens_its_normalized_training_images(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, SQUARE, "data.validation=0.2", layers=LAYERS)
    assert len(experiment.train) == 72
    x = experiment.network.inputs(ad.array(np.asarray(experiment.train.images))).numpy()
    expected = nn.Conv2d(8, kernel_size=2, weight_init="whitening").init((1, 6, 6), images=x)[0]["weight"]
    np.testing.assert_allclose(experiment.initial_state("cpu").params["0"]["weight"], expected, rtol=1e-5)


def test_whitening_takes_images_from_all_parts_of_the_training_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "WHITENING_PIXELS", 30 * 36)
    experiment = prepare(tmp_path, SQUARE, layers=LAYERS)
    every_third = np.asarray(experiment.train.images)[::3]
    found = experiment.network.input_weights(every_third)["0"]["weight"]
    np.testing.assert_array_equal(experiment.input_weights["0"]["weight"], found)


@pytest.mark.parametrize("split", ["data.validation=0", "data.validation=0.3"])
def test_members_of_a_sweep_have_the_whitened_weights_of_single_trainings(tmp_path: Path, split: str) -> None:
    (group,) = groups(tmp_path, "{training.seed: [3, 4]}", SQUARE, split, layers=LAYERS)
    for member in group.members:
        alone = prepare(tmp_path, SQUARE, split, f"training.seed={member.config.training.seed}", layers=LAYERS)
        found = group.of_member(member).initial_state("cpu").params
        for mine, expected in zip(tree.leaves(found), tree.leaves(alone.initial_state("cpu").params), strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_a_model_with_whitened_filters_that_are_not_trained_is_read_again(tmp_path: Path) -> None:
    path, run = write_config(tmp_path), tmp_path / "run"
    settings = [SQUARE, f"model.layers={LAYERS}", "parameter_groups=[{paths: 0.weight, trainable: false}]"]
    command("train", path, *(x for each in settings for x in ("--set", each)), "--epochs", 1, "--output-dir", run)
    expected = prepare(tmp_path, *settings[::2], layers=LAYERS).input_weights["0"]["weight"]
    found = model_file.load(run, "cpu").params["0"]
    np.testing.assert_array_equal(found["weight"], expected.astype(np.float32))
    assert found["bias"].numpy().any()


def test_gradcheck_draws_the_images_of_whitening(tmp_path: Path) -> None:
    rows = list(check_config(load(tmp_path, SQUARE, layers=LAYERS)))
    assert [row.case for row in rows if not row.passed] == []
    assert len(rows) == 4


def test_a_sine_layer_starts_with_the_bounds_of_siren_and_keeps_the_distribution_of_its_sines() -> None:
    layers = [nn.Sine(256, first=True), *(nn.Sine(256) for _ in range(4))]
    x: Any = ad.array(np.random.default_rng(0).uniform(-1, 1, (512, 2)).astype(np.float32))
    for i, layer in enumerate(layers):
        params, state = layer.init(x.shape[1], i)
        bound = 1 / x.shape[1] if layer.first else sqrt(6 / x.shape[1]) / 30
        assert 0.99 * bound < np.abs(params["weight"].numpy()).max() <= bound
        x, _ = layer.forward(params, state, x, nn.Mode(training=True))
    assert x.numpy().std() == pytest.approx(sqrt(0.5), abs=0.05)  # of the sine of a uniform angle


def test_fourier_features_are_not_trained_and_have_frequencies_of_the_scale() -> None:
    params, state = nn.FourierFeatures(20_000, scale=3.0).init(2)
    assert params == {}
    assert state["frequencies"].numpy().std() == pytest.approx(3, rel=0.02)


def test_the_cells_of_a_hash_grid_grow_geometrically_from_the_base_to_the_finest_resolution() -> None:
    assert nn.HashGrid(8, base_resolution=16, finest_resolution=2048).resolutions == tuple(16 * 2**i for i in range(8))
    assert nn.HashGrid(1, base_resolution=5).resolutions == (5,)
    with pytest.raises(ad.OptionError, match=r"^hash_grid: found finest_resolution 8 below base_resolution 16, "):
        nn.HashGrid(finest_resolution=8)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), processors=st.integers(1, 9), odd=st.booleans())
def test_weights_drawn_in_threads_are_those_of_one_generator(sizes: list[int], processors: int, odd: bool) -> None:
    rng, expected = np.random.default_rng(0), np.random.default_rng(0)
    for each in (rng, expected) if odd else ():
        each.integers(0, 9, dtype=np.uint32)  # keeps half of a word
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adtrain.nn.init.DRAWN_AT_ONCE", 16)
        patch.setattr("adtrain.nn.init.LEAST_DRAWN", 24)
        patch.setattr(os, "cpu_count", lambda: processors)
        for size in sizes:
            found = drawn("kaiming_uniform", (size, 6), rng, np.dtype(np.float64)).numpy()
            np.testing.assert_array_equal(found, expected.uniform(-1, 1, (size, 6)))
    assert rng.integers(0, 9, 3, dtype=np.uint32).tolist() == expected.integers(0, 9, 3, dtype=np.uint32).tolist()
