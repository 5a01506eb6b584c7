"""Parameter groups equal PyTorch's; in trainings, sweeps, resumed runs and on ranks they give what is promised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resumed_runs import check_same, resume_run, train
from sweep_runs import groups, trained
from training_runs import load, prepare

import adtrain as ad
from adtrain import nn, optim, training
from adtrain.config import ConfigError
from adtrain.core import tree
from adtrain.core.errors import OptionError
from adtrain.training import RunFolder, loop

MODEL = nn.Sequential(nn.Linear(4), nn.LayerNorm(), nn.Linear(3))
SHAPES = MODEL.parameter_shapes((5,))
GROUPS = (optim.NO_DECAY, optim.Group(("2.*", "1.bias"), lr_factor=3.0), optim.Group("2.bias", lr_factor=0.5))
FREEZE = "parameter_groups=[{paths: 0.*, trainable: false}]"
DIFFERING = "parameter_groups=[no_decay, {paths: 0.*, lr_factor: 2}, {paths: 2.weight, trainable: false}]"
LAYERS = "[linear: 8, tanh, linear: 8, layer_norm, linear: 3]"


def arrays(dtype: type = np.float64) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for path, shape in SHAPES.items():
        layer, _, name = path.partition(".")
        found.setdefault(layer, {})[name] = ad.array(rng.normal(size=shape).astype(dtype))
    return found


@pytest.mark.parametrize(
    ("ours", "class_name", "options"),
    [
        (optim.AdamW(0.01, weight_decay=0.3), "AdamW", {"weight_decay": 0.3}),
        (optim.SGD(0.1, momentum=0.9, weight_decay=0.1), "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ],
    ids=["adamw", "sgd"],
)
@pytest.mark.needs_torch
def test_twenty_steps_equal_pytorchs_parameter_groups(
    ours: optim.Optimizer, class_name: str, options: Mapping[str, Any]
) -> None:
    import torch

    frozen = optim.Group("0.bias", trainable=False)
    optimizer = optim.grouped(ours, [*GROUPS, frozen], SHAPES)
    params = arrays()
    state = optimizer.init(params)
    theirs = {
        path: torch.nn.Parameter(torch.tensor(x.numpy()))
        for path, x in zip(SHAPES, tree.leaves(params), strict=True)
    }  # fmt: skip
    factors = {"1.bias": 3.0, "2.weight": 3.0, "2.bias": 0.5}
    decayed = ("0.weight", "2.weight")
    rates = {path: ours.lr * factors.get(path, 1.0) for path in SHAPES if path != "0.bias"}
    no_decay = {path: {} if path in decayed else {"weight_decay": 0.0} for path in rates}
    their_optimizer = getattr(torch.optim, class_name)(
        [{"params": [theirs[path]], "lr": lr, **no_decay[path]} for path, lr in rates.items()], **{**options, "lr": 1.0}
    )
    rng = np.random.default_rng(1)
    for i in range(20):
        grads = tree.map(lambda p: rng.normal(size=p.shape), params)
        for parameter, grad in zip(theirs.values(), tree.leaves(grads), strict=True):
            parameter.grad = torch.tensor(grad)
        for group, lr in zip(their_optimizer.param_groups, rates.values(), strict=True):
            group["lr"] = lr * (1 + i % 3)
        their_optimizer.step()
        params, state = optimizer.update(params, tree.map(ad.array, grads), state, ours.lr * (1 + i % 3))
    for mine, parameter in zip(tree.leaves(params), theirs.values(), strict=True):
        np.testing.assert_allclose(mine, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)
    assert state["step"].item() == 20
    names = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}[class_name]
    for name in names:
        assert list(state[name]) == list(rates)
        for path, x in state[name].items():
            expected = their_optimizer.state[theirs[path]][name].numpy()
            np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-12)


@given(factors=st.lists(st.sampled_from([None, 0.5, 2.0, 4.0]), min_size=1, max_size=4), data=st.data())
def test_the_last_group_that_sets_an_option_counts(factors: list[float | None], data: st.DataObject) -> None:
    patterns = [data.draw(st.sampled_from(["*", "0.*", "*.bias", "vectors", "2.weight"])) for _ in factors]
    found = [optim.Group(x, lr_factor=f, weight_decay=0.0) for x, f in zip(patterns, factors, strict=True)]
    optimizer = optim.grouped(optim.SGD(1.0), found, SHAPES)
    params = arrays()
    moved, _ = optimizer.update(params, tree.map(ad.ops.ones_like, params), optimizer.init(params))
    changes = [
        float((new - old).max().item()) for new, old in zip(tree.leaves(moved), tree.leaves(params), strict=True)
    ]
    for (path, shape), change in zip(SHAPES.items(), changes, strict=True):
        expected = [x.lr_factor for x in found if x.lr_factor is not None and x.matches(path, len(shape))]
        assert change == pytest.approx(-(expected or [1.0])[-1])


def test_an_update_is_pure_and_keeps_the_structure() -> None:
    optimizer = optim.grouped(optim.Adam(), [*GROUPS, optim.Group("0.*", trainable=False)], SHAPES)
    params = arrays(np.float32)
    state = optimizer.init(params)
    new = optimizer.update(params, params, state)
    assert tree.paths(new) == tree.paths((params, state))
    assert [(x.shape, x.dtype) for x in tree.leaves(new)] == [(x.shape, x.dtype) for x in tree.leaves((params, state))]
    assert new[0]["0"] == params["0"]


@pytest.mark.parametrize(
    ("optimizer", "group", "message"),
    [
        (optim.SGD(0.1), optim.Group("0.*"), "found paths alone, expected also lr_factor, weight_decay or trainable"),
        (
            optim.SGD(0.1),
            optim.Group(("0.*", "7.*"), lr_factor=2.0),
            "found 7.*, which matches no parameter "
            "(known: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias)",
        ),
    ],
)  # fmt: skip
def test_the_error_of_a_group_that_does_not_fit(optimizer: optim.Optimizer, group: optim.Group, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        optim.grouped(optimizer, [optim.NO_DECAY, group], SHAPES)
    assert str(caught.value) == f"group 1: {message}"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("[{paths: 9.*, trainable: false}]", "[0]: found 9.*, which matches no parameter"),
        ("[no_decay, {paths: '*'}]", "[1]: found paths alone, expected also"),
        ("[{paths: '*', trainable: false}]", ": found no parameter that is trained, expected at least one"),
        ("[nodecay]", "[0]: found 'nodecay', expected no_decay, or a mapping such as {paths: 0.*, lr_factor: 2}"),
        ("[{paths: 0.*, lr: 2}]", "[0].lr: unknown key"),
    ],
)
def test_the_line_of_a_wrong_group_in_a_config(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, f"parameter_groups={setting}")
    (line,) = str(caught.value).splitlines()
    assert f"parameter_groups{message}" in line


def test_frozen_parameters_keep_their_values_and_cost_no_gradient(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, FREEZE, "training.clip_norm=0.1", layers=LAYERS)
    before = experiment.initial_state("cpu")
    after = training.run(experiment).state
    for path, old, new in zip(
        tree.paths(before.params), tree.leaves(before.params), tree.leaves(after.params), strict=True
    ):
        assert np.array_equal(old, new) == path.startswith("0."), path
    assert not [path for path in tree.paths(after.optimizer) if ".0." in path]
    backward = [x for x in experiment.step_program().equations if x.phase == "backward" and x.scope.startswith("0.")]
    assert not backward


def test_members_whose_factors_and_decays_differ_agree_with_their_own_trainings(tmp_path: Path) -> None:
    sweep = "{parameter_groups.1.lr_factor: [2, 5], parameter_groups.3.weight_decay: [0.1, 0.2]}"
    decay = DIFFERING[:-1] + ", {paths: 4.weight, weight_decay: 0.3}]"
    (group,) = groups(tmp_path, sweep, "optimizer={adamw: {lr: 0.01}}", decay, "schedule=cosine", layers=LAYERS)
    together = trained(group, group.members)
    for row, member in enumerate(group.members):
        alone = training.run(training.prepare(member.config)).state
        for x, expected in zip(tree.leaves(together.state), tree.leaves(alone), strict=True):
            np.testing.assert_allclose(np.asarray(x)[row], expected.numpy(), rtol=1e-3, atol=1e-5)


def test_a_decay_of_zero_or_another_frozen_layer_makes_another_group_of_members(tmp_path: Path) -> None:
    sweep = "{parameter_groups: [[{paths: 0.*, weight_decay: 0}], [{paths: 0.*, weight_decay: 0.1}], [no_decay]]}"
    assert len(groups(tmp_path, sweep, layers=LAYERS)) == 3


def test_a_stopped_run_resumes_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, DIFFERING, "training.epochs=2", "data.validation=0.2", layers=LAYERS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    assert not train(experiment, RunFolder.create(experiment, tmp_path / "stopped"), stop_call=7)
    assert resume_run(tmp_path / "stopped", experiment)
    check_same(tmp_path / "uninterrupted", tmp_path / "stopped")


def test_a_config_without_groups_has_the_optimizer_itself(tmp_path: Path) -> None:
    assert training.prepare(load(tmp_path)).optimizer == optim.Adam(0.01)
