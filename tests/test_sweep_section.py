from __future__ import annotations

from pathlib import Path

import pytest
from config_files import SMALL, load, problems
from hypothesis import given
from hypothesis import strategies as st

from adtrain import config
from adtrain.config.files import varied
from adtrain.config.source import of_python
from adtrain.config.sweep_section import parse
from adtrain.sweeps.members import members_of
from adtrain.text import counted

TEXT = SMALL.replace("LAYERS", "    - flatten\n    - linear: 10").replace(
    "optimizer: adam", "optimizer: {adam: {lr: 0.1}}"
)


def sweep_of(section: object) -> list[dict[str, object]]:
    found = parse(of_python(section, "sweep"))
    return [{key: node.plain() for key, node in values.items()} for values in found.members()]


def test_lists_and_ranges_form_a_grid() -> None:
    found = sweep_of({"optimizer.adam.lr": [0.1, 0.2], "training.seed": {"range": [3, 5]}})
    assert [tuple(x.values()) for x in found] == [(0.1, 3), (0.1, 4), (0.2, 3), (0.2, 4)]


def test_random_values_are_drawn_together_and_crossed_with_the_grid() -> None:
    uniform, logarithmic = {"uniform": [2, 3], "samples": 4}, {"log_uniform": [1e-4, 1e-2], "samples": 4}
    found = sweep_of({"a.b": uniform, "a.c": logarithmic, "training.seed": {"range": 2}})
    assert len(found) == 8
    assert len({(x["a.b"], x["a.c"]) for x in found}) == 4


@given(
    low=st.floats(1e-6, 1.0),
    ratio=st.floats(1.01, 1e6),
    kind=st.sampled_from(["uniform", "log_uniform"]),
    seed=st.integers(0, 2**40),
)
def test_random_values_lie_in_their_range_and_do_not_depend_on_other_keys(
    low: float, ratio: float, kind: str, seed: int
) -> None:
    axis = {kind: [low, low * ratio], "samples": 5}
    alone = sweep_of({"a.b": axis, "draw_seed": seed})
    beside = sweep_of({"a.a": axis, "a.b": axis, "draw_seed": seed})
    assert [x["a.b"] for x in alone] == [x["a.b"] for x in beside]
    assert all(low <= float(str(x["a.b"])) <= low * ratio for x in alone)


def test_a_member_has_its_values_and_no_sweep(tmp_path: Path) -> None:
    cfg = load(tmp_path, TEXT + "sweep: {model.layers.1.linear: [5, 6], training.seed: [7]}\n")
    first, second = (varied(cfg, values) for values in config.build.sweep(cfg).members())
    assert first.model.layers[1].options()["out_features"] == 5
    assert second.model.layers[1].options()["out_features"] == 6
    assert first.training.seed == 7
    assert first.sweep is None


def test_a_dumped_config_has_the_same_members(tmp_path: Path) -> None:
    cfg = load(tmp_path, TEXT + "sweep: {optimizer.adam.lr: {uniform: [1, 2], samples: 3}, rank_by: train_loss}\n")
    again = load(tmp_path, config.dump(cfg))
    values = [
        [{k: n.plain() for k, n in x.items()} for x in config.build.sweep(each).members()] for each in (cfg, again)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{}", "c.yaml:11:8: sweep: found an empty mapping, expected a mapping of keys to lists of values"),
        ("{rank_by: train_loss}", "c.yaml:11:8: sweep: found no key with values, expected one such as training.seed"),
        ("{training.seed: []}", "c.yaml:11:24: sweep.training.seed: found [], expected a list that is not empty"),
        (
            "{training.seed: {range: 0}}",
            "c.yaml:11:32: sweep.training.seed.range: found 0, expected 1 to 100,000 values",
        ),
        (
            "{a.b: {rang: 3}}",
            "c.yaml:11:14: sweep.a.b: found a mapping with rang, expected one of range, log_uniform, uniform, choice; "
            "did you mean range?",
        ),
        (
            "{a: {b: [1, 2]}}",
            "c.yaml:11:12: sweep.a: found a mapping with b, expected one of range, log_uniform, uniform, choice; "
            "a key is a whole path, such as optimizer.adam.lr",
        ),
        (
            "{a.b: {uniform: [2, 1], samples: 2}}",
            "c.yaml:11:24: sweep.a.b.uniform: found [2, 1], expected [low, high] with low below high",
        ),
        (
            "{a.b: {log_uniform: [0, 1], samples: 2}}",
            "c.yaml:11:28: sweep.a.b.log_uniform: found [0, 1], expected numbers above 0",
        ),
        (
            "{a.b: {choice: [1], samples: 2}, a.c: {choice: [1], samples: 3}}",
            "c.yaml:11:41: sweep.a.c: found samples 3, expected 2 as of a.b: random values are drawn together",
        ),
        ("{a.b: [1], a[b]: 3}", None),
        ("{rank_by: speed, a.b: [1]}", None),
        ("{order: mine, a.b: [1]}", "c.yaml:11:16: sweep.order: found 'mine', expected one of own, shared"),
    ],
)
def test_mistakes_are_refused_with_their_place(tmp_path: Path, section: str, message: str | None) -> None:
    found = problems(tmp_path, TEXT + f"sweep: {section}\n")
    assert message is None or found == [message]
    assert all(line.startswith("c.yaml:11:") for line in found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("training.seeds: [1]", "c.yaml:12:20: training.seeds: unknown key; did you mean seed?"),
        (
            "optimizer.adam.lr: [0.1, -1]",
            "c.yaml:12:28: optimizer.adam.lr: found -1, expected a number in (0, 3.4e38]",
        ),
        (
            "optimizer.sgd.lr: [0.1, 1]",
            "c.yaml:12:22: optimizer.sgd.lr: found sgd, expected adam, the config's optimizer; "
            "to train with both, sweep optimizer: [adam, sgd] with their options",
        ),
        (
            "optimizer.adm.lr: [0.1, 1]",
            "c.yaml:12:22: optimizer.adm.lr: unknown optimizer 'adm'; did you mean adam?",
        ),
        (
            "optimizer.adam.lr: [0.1]\n  optimizer: [adam, {adam: {lr: 0.5}}]",
            "c.yaml:13:21: optimizer: found a mapping with adam, which optimizer.adam.lr replaces; "
            "expected one of the two",
        ),
        (
            "data.batch_size: [4]\n  data: [{dataset: mnist, batch_size: 8}]",
            "c.yaml:13:10: data: found a mapping with dataset, batch_size, which data.batch_size replaces; "
            "expected one of the two",
        ),
        (
            "model.layers.1.linear: [8]\n  model.layers.1.linear.out_features: [10]",
            "c.yaml:12:27: model.layers.1.linear: found 8, which model.layers.1.linear.out_features replaces; "
            "expected one of the two",
        ),
        (
            "model.layers.1.linear: [8]\n  model.layers.01.linear: [10]",
            "c.yaml:12:27: model.layers.1.linear: found 8, which model.layers.01.linear replaces; "
            "expected one of the two",
        ),
        ("model.layers.7.linear: [1]", "c.yaml:12:27: found the index 7, expected one from 0 to 1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    cfg = load(tmp_path, TEXT + f"sweep:\n  {line}\n")
    with pytest.raises(config.ConfigError) as caught:
        members_of(cfg)
    assert str(caught.value).replace(f"{tmp_path}/", "") == message


def test_values_that_do_not_fit_are_all_reported_once(tmp_path: Path) -> None:
    lines = "  training.seed: [1, -1, 2]\n  optimizer.adam.lr: [0.1, fast]\n  loss: [cross_entropi, cross_entropy]\n"
    cfg = load(tmp_path, TEXT + "sweep:\n" + lines)
    with pytest.raises(config.ConfigError) as caught:
        members_of(cfg)
    assert sorted(line.replace(f"{tmp_path}/", "") for line in str(caught.value).splitlines()) == [
        "c.yaml:12:22: training.seed: found -1, expected an integer in [0, 2^64)",
        "c.yaml:13:28: optimizer.adam.lr: found 'fast', expected a number in (0, 3.4e38]",
        "c.yaml:14:10: loss: unknown loss 'cross_entropi'; did you mean cross_entropy?",
    ]


def test_an_optimizer_and_its_options_are_swept_together_in_any_order(tmp_path: Path) -> None:
    cfg = load(tmp_path, TEXT + "sweep: {optimizer.adam.lr: [0.1, 0.2], optimizer: [{adam: {betas: [0.8, 0.9]}}]}\n")
    values = [member.config.optimizer.options() for member in members_of(cfg)]
    assert [(x["lr"], x["betas"]) for x in values] == [(0.1, (0.8, 0.9)), (0.2, (0.8, 0.9))]


@pytest.mark.parametrize(
    ("sweep", "count"),
    [
        ("{optimizer.adam.lr: [0.01, 1e-2, 0.01, 0.02]}", 2),
        ("{training.seed: [1, 1, 2], optimizer: [adam, {adam: {}}, {adam: 0.001}]}", 2),
        ("{model.layers.1: [linear: 10, {linear: {out_features: 10}}]}", 1),
        ("{training.seed: {choice: [1, 2], samples: 9}}", 2),
    ],
)
def test_one_of_several_members_with_equal_values_is_trained_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sweep: str, count: int
) -> None:
    cfg = load(tmp_path, TEXT + f"sweep: {sweep}\n")
    members = members_of(cfg)
    assert [member.number for member in members] == list(range(count))
    left_out = len(config.build.sweep(cfg).members()) - count
    (warning,) = caplog.messages
    assert warning == (
        f"adtrain: warning: {tmp_path}/c.yaml:11:1: sweep: left out {counted(left_out, 'members')} "
        "with the same values as another one"
    )
