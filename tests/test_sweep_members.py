from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_runs import SGD, bytes_of, groups, run, session, trained

from adtrain import config, training
from adtrain.core import tree

LRS = "{optimizer.adam.lr: [0.01, 0.03, 0.002], training.seed: {range: 2}}"
VALIDATED = "data.validation=0.2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("order", "code"),
    [
        ("own", "quick_compiler"),
        pytest.param("shared", "quick_compiler", marks=pytest.mark.exhaustive),
        pytest.param("own", "optimised", marks=pytest.mark.exhaustive),
    ],
)
def test_the_bytes_of_a_member_do_not_depend_on_the_others(
    folder: Path, request: pytest.FixtureRequest, order: str, code: str
) -> None:
    request.getfixturevalue(code)
    sweep = f"{{order: {order}, {LRS[1:]}"
    (group,) = groups(folder, sweep, "data.batch_size=30", "training.epochs=2")
    members = list(group.members)
    expected = bytes_of(trained(group, [members[4]]), 4)
    for chosen in (members, [members[i] for i in (5, 4, 0)]):
        assert bytes_of(trained(group, chosen), 4) == expected


@pytest.mark.compiled
@pytest.mark.exhaustive
def test_a_member_alone_with_convolutions_has_the_bytes_of_one_among_others(folder: Path) -> None:
    conv = "conv2d: {out_channels: 16, kernel_size: 3, padding: 1}"
    layers = f"[{conv}, batch_norm2d, relu, {conv}, relu, flatten, linear: 3]"
    overrides = "model.input=[1, 6, 6]", "data.batch_size=30", "training.epochs=1"
    (group,) = groups(folder, "{training.seed: {range: 4}}", *overrides, layers=layers)
    members = list(group.members)
    expected = bytes_of(trained(group, [members[2]]), 2)
    for chosen in (members, members[3:1:-1], members[2::-1]):
        assert bytes_of(trained(group, chosen), 2) == expected


def test_a_member_that_fails_keeps_its_last_finite_epoch_and_does_not_touch_the_others(folder: Path) -> None:
    # The rate of the second member grows after the first epoch.
    schedules = "{schedule: [constant, {step: {step_size: 1, gamma: 1.0e+30}}, cosine]}"
    (group,) = groups(folder, schedules, SGD, "data.batch_size=30", "training.epochs=3")
    beside = trained(group, group.members)
    assert beside.frozen == (1,)
    assert bytes_of(beside, 1) == bytes_of(trained(group, group.members, epochs=1), 1)
    assert bytes_of(beside, 2) == bytes_of(trained(group, [group.members[2]]), 2)


@pytest.mark.parametrize(
    ("optimizer", "sweep"),
    [
        (
            "adam: {lr: 0.01}",
            "{optimizer.adam.betas: [[0.9, 0.99], [0.8, 0.999]], optimizer.adam.eps: [1.0e-8, 1.0e-3]}",
        ),
        pytest.param(
            "adamw: {lr: 0.01}",
            "{optimizer.adamw.weight_decay: [0.1, 0.2], schedule: [cosine, constant]}",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "sgd: {lr: 0.1, momentum: 0.9, nesterov: true}",
            "{optimizer.sgd.momentum: [0.5, 0.9], training.seed: [3, 4]}",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "lion: {lr: 0.01}",
            "{optimizer.lion.betas: [[0.9, 0.99], [0.8, 0.9]], optimizer.lion.weight_decay: [0.1, 0.2]}",
            marks=pytest.mark.exhaustive,
        ),
        ("rmsprop: {lr: 0.01}", "{optimizer.rmsprop.alpha: [0.9, 0.99], schedule: [{step: 1}, {step: 2}]}"),
    ],
)
def test_a_member_agrees_with_its_own_training(folder: Path, optimizer: str, sweep: str) -> None:
    settings = VALIDATED, "training.clip_norm=1", "training.epochs=2", "training.final_model=last"
    found = groups(folder, sweep, f"optimizer={{{optimizer}}}", *settings)
    for group in found:
        together = trained(group, group.members)
        for row in (0, len(group.members) - 1):  # every key of the sweep has another value
            alone = training.run(training.prepare(group.members[row].config)).state
            for x, expected in zip(tree.leaves(together.state), tree.leaves(alone), strict=True):
                np.testing.assert_allclose(np.asarray(x)[row], expected.numpy(), rtol=1e-3, atol=1e-5)


def test_members_are_augmented_as_in_their_own_trainings(folder: Path) -> None:
    augment = "data.augment=[crop: {padding: 2, padding_mode: reflect}, flip: {alternate: true}, cutmix]"
    settings = VALIDATED, "training.epochs=2", "training.final_model=last", augment
    (group,) = groups(folder, "{training.seed: [3, 4]}", "optimizer={sgd: {lr: 0.1}}", *settings)
    together = trained(group, group.members)
    for row, member in enumerate(group.members):
        alone = training.run(training.prepare(member.config)).state
        for x, expected in zip(tree.leaves(together.state), tree.leaves(alone), strict=True):
            np.testing.assert_allclose(np.asarray(x)[row], expected.numpy(), rtol=1e-3, atol=1e-5)


def test_members_of_other_shapes_or_options_are_other_groups(folder: Path) -> None:
    sweep = "{model.layers.0.linear: [8, 9], data.batch_size: [16, 32], optimizer.adam.lr: [0.1, 0.2]}"
    assert [[x.number for x in group.members] for group in groups(folder, sweep)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_zero_that_leaves_an_operation_out_makes_another_group(folder: Path) -> None:
    found = groups(folder, "{optimizer.sgd.momentum: [0.0, 0.9, 0.8]}", SGD)
    assert [[x.number for x in group.members] for group in found] == [[0], [1, 2]]


@settings(max_examples=10)
@given(seed=st.integers(0, 2**64 - 1))
def test_a_member_has_the_order_and_the_split_of_its_seed(folder: Path, seed: int) -> None:
    (group,) = groups(folder, f"{{training.seed: [{seed}]}}", VALIDATED)
    (member,) = group.members
    experiment = training.prepare(member.config)
    rows, validation = group.rows(seed)
    assert validation is not None
    assert experiment.validation is not None
    np.testing.assert_array_equal(np.asarray(group.whole.images)[rows], np.asarray(experiment.train.images))
    np.testing.assert_array_equal(np.asarray(group.whole.images)[validation], np.asarray(experiment.validation.images))


def test_keys_that_a_sweep_cannot_have_are_refused(folder: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"training.checkpoint_every: found it in a sweep"):
        groups(folder, "{training.seed: [1]}", "training.checkpoint_every=5")
    with pytest.raises(config.ConfigError, match=r"data.shards: found it in a sweep"):
        groups(folder, "{data.shards: [1, 2]}")


@pytest.mark.compiled
def test_waves_give_the_results_of_all_members_at_once(tmp_path: Path) -> None:
    found = session(tmp_path, LRS, "data.batch_size=30", "training.epochs=2")
    assert [plan.waves for plan in found.plans(4)] == [(3, 3)]
    results = [run(found, tmp_path / str(most), most).run() for most in (4, None)]
    assert results[0].members == results[1].members
