"""Muon equals PyTorch's in float64, orthogonalizes, and trains in sweeps, on ranks and after a resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resumed_runs import check_same, resume_run, train
from sweep_runs import groups, trained
from training_runs import prepare

import adtrain as ad
from adtrain import config, ops, optim, training
from adtrain.core import tree
from adtrain.core.errors import OptionError
from adtrain.optim.muon import orthogonalized
from adtrain.training import RunFolder, loop

SHAPES = {"a": (6, 4), "b": (6, 4), "c": (3, 5), "d": (4, 2, 3, 3), "bias": (6,), "head": (3, 6)}
MUON = "optimizer={muon: {lr: 0.05, rest: {sgd: {lr: 0.1, momentum: 0.9}}, rest_paths: 4.*}}"
CONV = "{conv2d: {out_channels: 3, kernel_size: 3}}"
LAYERS = f"[{CONV}, relu, {CONV}, flatten, linear: 3]"
IMAGES = "model.input=[1,6,6]"


def start(dtype: type = np.float64) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: ad.array(rng.normal(size=shape).astype(dtype)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("options", "in_torch"),
    [
        ({}, {"adjust_lr_fn": "original"}),
        (
            {"momentum": 0.8, "nesterov": False, "weight_decay": 0.1, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
            {"momentum": 0.8, "nesterov": False, "weight_decay": 0.1, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
        ),
    ],
    ids=["defaults", "options"],
)
@pytest.mark.needs_torch
def test_twenty_steps_equal_pytorch(
    options: dict[str, Any], in_torch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # PyTorch's steps in float64, too
    optimizer = optim.Muon(0.05, **options, rest=optim.SGD(0.2, momentum=0.9), rest_paths="head")
    params = start()
    state = optimizer.init(params)
    matrices = [name for name, shape in SHAPES.items() if len(shape) > 1 and name != "head"]
    theirs = {
        name: torch.nn.Parameter(torch.tensor(x.numpy().reshape(x.shape[0], -1) if name in matrices else x.numpy()))
        for name, x in params.items()
    }
    their_muon = torch.optim.Muon([theirs[x] for x in matrices], lr=0.05, **{"weight_decay": 0.0, **in_torch})
    their_rest = torch.optim.SGD([theirs["bias"], theirs["head"]], lr=0.2, momentum=0.9)
    rng = np.random.default_rng(1)
    for i in range(20):
        grads = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
        for name, grad in grads.items():
            theirs[name].grad = torch.tensor(grad.reshape(theirs[name].shape))
        for other, lr in ((their_muon, 0.05), (their_rest, 0.2)):
            other.param_groups[0]["lr"] = lr * (1 + i % 3)
            other.step()
        params, state = optimizer.update(params, tree.map(ad.array, grads), state, 0.05 * (1 + i % 3))
    for name, x in params.items():
        np.testing.assert_allclose(x.numpy().reshape(theirs[name].shape), theirs[name].detach().numpy(), rtol=1e-9)
    assert state["step"].item() == 20
    assert set(state["momentum_buffer"]) == set(SHAPES)
    for name in matrices:  # PyTorch's buffer is a mean of the gradients, ours a sum as that of SGD
        expected = their_muon.state[theirs[name]]["momentum_buffer"].numpy() / (1 - optimizer.momentum)
        np.testing.assert_allclose(state["momentum_buffer"][name].numpy().reshape(expected.shape), expected, rtol=1e-9)


@settings(max_examples=25)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), count=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_singular_values_come_close_to_one_and_singular_vectors_stay(
    rows: int, columns: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    least = min(rows, columns)
    given_arrays, vectors = [], []
    for _ in range(count):
        u, _, vt = np.linalg.svd(rng.normal(size=(rows, columns)), full_matrices=False)
        given_arrays.append(ad.array(u * rng.uniform(0.1, 1, least) @ vt))
        vectors.append((u, vt))
    for x, (u, vt) in zip(orthogonalized(given_arrays, 5), vectors, strict=True):
        inner = u.T @ x.numpy() @ vt.T
        diagonal = np.diagonal(inner)
        assert ((diagonal > 0.6) & (diagonal < 1.25)).all()
        np.testing.assert_allclose(inner, np.diag(diagonal), atol=1e-9)


def test_products_in_bfloat16_change_the_direction_by_a_few_percent() -> None:
    x = np.random.default_rng(0).normal(size=(32, 90))
    (expected,) = orthogonalized([ad.array(x)], 5)
    with ops.matmul_precision("bfloat16"):
        (rounded,) = orthogonalized([ad.array(x.astype(np.float32))], 5)
    error = np.linalg.norm(rounded.numpy() - expected.numpy()) / np.linalg.norm(expected.numpy())
    assert 1e-4 < error < 0.05


def test_zero_gradients_stay_zero() -> None:
    (x,) = orthogonalized([ad.array(np.zeros((3, 4), np.float32))], 5)
    np.testing.assert_array_equal(x, np.zeros((3, 4)))


def test_normalized_weights_have_the_norm_of_their_rows_before_the_update() -> None:
    optimizer = optim.Muon(1e-30, momentum=0.0, normalize_weights=True)
    params = start()
    moved, state = optimizer.update(params, params, optimizer.init(params))
    for name, shape in SHAPES.items():
        scale = np.linalg.norm(params[name]) / np.sqrt(shape[0]) if len(shape) > 1 else 1.0
        np.testing.assert_allclose(moved[name].numpy() * scale, params[name], rtol=1e-2 if scale == 1.0 else 1e-12)
    assert "momentum_buffer" not in state


def test_the_rest_follows_the_schedule_at_its_own_rate() -> None:
    optimizer = optim.Muon(0.5, rest=optim.SGD(0.25))
    params = {"bias": ad.array(np.zeros(3))}
    moved, _ = optimizer.update(params, {"bias": ad.array(np.ones(3))}, optimizer.init(params), 0.1)
    np.testing.assert_allclose(moved["bias"], np.full(3, -0.05))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.Muon(rest=optim.Muon()),
            "muon: rest is muon, expected an optimizer of arrays of one axis, such as adamw",
        ),
        (lambda: optim.Muon(ns_steps=0), "muon: ns_steps is 0, expected an integer in [1, 2^31)"),
        (
            lambda: optim.Muon(adjust_lr_fn="x"),  # type: ignore[arg-type]
            "muon: adjust_lr_fn is 'x', expected one of original, match_rms_adamw, none",
        ),
    ],
)
def test_the_error_of_an_invalid_option(make: Callable[[], optim.Optimizer], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("rest: {sgd: {lrr: 1}}", "optimizer.muon.rest.sgd.lrr: unknown key; did you mean lr?"),
        ("rest: sdg", "optimizer.muon.rest: unknown optimizer 'sdg'; did you mean sgd?"),
        ("rest: {sgd: {lr: 1, nesterov: true}}", "optimizer.muon.rest sgd: nesterov needs a momentum above 0"),
        ("rest_paths: x", "optimizer muon: rest_paths: found x, which matches no parameter (known: 0.weight, 0.bias,"),
    ],
)
def test_the_line_of_a_wrong_option_in_a_config(tmp_path: Path, options: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        prepare(tmp_path, f"optimizer={{muon: {{{options}}}}}")
    assert message in str(caught.value)


def test_members_with_other_rates_agree_with_their_own_trainings(tmp_path: Path) -> None:
    sweep = "{optimizer.muon.lr: [0.05, 0.01], optimizer.muon.rest.sgd.lr: [0.1, 0.3], optimizer.muon.momentum: [0.9]}"
    (group,) = groups(tmp_path, sweep, MUON, IMAGES, "schedule=cosine", "training.epochs=1", layers=LAYERS)
    together = trained(group, group.members)
    for row, member in enumerate(group.members):
        alone = training.run(training.prepare(member.config)).state
        for x, expected in zip(tree.leaves(together.state), tree.leaves(alone), strict=True):
            np.testing.assert_allclose(np.asarray(x)[row], expected.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.compiled
def test_a_compiled_run_with_groups_resumes_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: None
) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    groups = "parameter_groups=[{paths: 0.*, trainable: false}, {paths: vectors, lr_factor: 2}]"
    experiment = prepare(tmp_path, MUON, groups, IMAGES, "training.epochs=2", "data.batch_size=30", layers=LAYERS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    assert not train(experiment, RunFolder.create(experiment, tmp_path / "stopped"), stop_call=3)
    assert resume_run(tmp_path / "stopped", experiment)
    check_same(tmp_path / "uninterrupted", tmp_path / "stopped")


def test_products_have_the_precision_of_the_training(tmp_path: Path) -> None:
    for precision in ("float32", "bfloat16"):
        experiment = prepare(tmp_path, "optimizer=muon", f"training.precision={precision}")
        products = [
            x for x in experiment.step_program(passes=()).equations if x.phase == "update" and "precision" in x.params
        ]
        assert {x.params["precision"] for x in products} == {"full" if precision == "float32" else precision}
        assert len(products) == 2 * 5 * 3  # two shapes, five steps, three products


def test_the_loss_falls_in_float32() -> None:
    optimizer, params = optim.Muon(0.05), start(np.float32)

    def loss(params: Any) -> ad.Value:
        return sum((ops.square(x - 1.0).sum() for x in tree.leaves(params)), ad.array(0.0, np.float32))

    state, value_and_grad = optimizer.init(params), ad.value_and_grad(loss)
    first = value_and_grad(params)[0].item()
    for _ in range(30):
        params, state = optimizer.update(params, value_and_grad(params)[1], state)
    assert value_and_grad(params)[0].item() < 0.7 * first
