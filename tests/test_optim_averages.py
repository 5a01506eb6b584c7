"""Averages of weights: PyTorch's moving average, slow weights by their formula, and what a training does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resumed_runs import check_same, resume_run, train
from sweep_runs import groups, trained
from training_runs import prepare

import adtrain as ad
from adtrain import config, optim, training
from adtrain.core import tree
from adtrain.training import RunFolder, loop, model_file
from adtrain.training.checkpoint import fetch
from adtrain.training.step import averaged

LAYERS = "[linear: 8, batch_norm1d, relu, linear: 3]"
SETTINGS = ("data.validation=0.2", "training.epochs=3", "optimizer={sgd: 0.3}")


def steps(seed: int, count: int = 20) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)} for _ in range(count)]


def run(average: optim.Average, weights: list[dict[str, np.ndarray]], first: dict[str, np.ndarray]) -> Any:
    """The average, and the weights that it returned, after steps that led to `weights`."""
    state, params = average.init(tree.map(ad.array, first), {}), None
    for i, given_weights in enumerate(weights):
        params, state = average.updated(tree.map(ad.array, given_weights), {}, state, ad.array(np.int64(i)))
    return params, state["params"]


@pytest.mark.needs_torch
def test_twenty_steps_of_ema_equal_pytorch() -> None:
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.tensor(x)) for name, x in steps(1)[0].items()})
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for weights in steps(0):
        with torch.no_grad():
            for name, x in weights.items():
                module[name].copy_(torch.tensor(x))
        theirs.update_parameters(module)
    params, average = run(optim.EMA(0.9), steps(0), steps(1)[0])
    for name, x in average.items():
        np.testing.assert_allclose(x, theirs.module[name].detach().numpy(), rtol=1e-12)
        np.testing.assert_array_equal(params[name], steps(0)[-1][name])


@given(every=st.integers(1, 7), alpha=st.floats(0, 1), count=st.integers(1, 15))
def test_lookahead_moves_slow_weights_at_every_kth_step(every: int, alpha: float, count: int) -> None:
    first, weights = steps(1)[0], steps(0, count)
    slow = dict(first)
    for i, fast in enumerate(weights):
        if (i + 1) % every == 0:
            slow = {name: s + alpha * (fast[name] - s) for name, s in slow.items()}
    params, average = run(optim.Lookahead(every, alpha), weights, first)
    for name, x in average.items():
        np.testing.assert_allclose(x, slow[name], rtol=1e-12)
        np.testing.assert_array_equal(params[name], x.numpy() if count % every == 0 else weights[-1][name])


@pytest.mark.parametrize("average", ["{ema: 0.8}", "{lookahead: {steps: 4}}"])
def test_the_average_is_evaluated_and_saved_and_a_stopped_run_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, average: str
) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    last = "training.final_model=last"
    experiment = prepare(tmp_path, *SETTINGS, last, f"training.average={average}", layers=LAYERS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    assert not train(experiment, RunFolder.create(experiment, tmp_path / "stopped"), stop_call=9)
    assert resume_run(tmp_path / "stopped", experiment)
    check_same(tmp_path / "uninterrupted", tmp_path / "stopped")

    state = training.resume(tmp_path / "uninterrupted").start.checkpoint.state
    model = model_file.load(tmp_path / "uninterrupted", "cpu")
    used = averaged(state)
    for found, expected in zip(tree.leaves((model.params, model.statistics)), tree.leaves(used[:2]), strict=True):
        np.testing.assert_array_equal(found.numpy(), np.asarray(expected))
    assert any(
        not np.array_equal(x, y) for x, y in zip(tree.leaves(state.params), tree.leaves(used.params), strict=True)
    )
    result = training.run(experiment)
    score = training.Evaluation(
        experiment.evaluation_step, experiment.network.task, training.on_device(experiment.test, "cpu")
    ).score(model.params, model.statistics)
    assert score == result.test


def test_ema_does_not_change_the_training(tmp_path: Path) -> None:
    settings = "training.epochs=1", "optimizer={sgd: 0.3}"
    plain = training.run(prepare(tmp_path, *settings))
    found = training.run(prepare(tmp_path, *settings, "training.average=ema"))
    assert (found.train, found.best) == (plain.train, plain.best)
    assert found.test != plain.test


def test_members_agree_with_their_own_trainings(tmp_path: Path) -> None:
    average = "training.average={ema: 0.5}"
    (group,) = groups(tmp_path, "{optimizer.sgd.lr: [0.1, 0.3]}", *SETTINGS, average, layers=LAYERS)
    together = trained(group, group.members)
    for row, member in enumerate(group.members):
        alone = training.run(training.prepare(member.config))
        mine = averaged(tree.map(lambda x, row=row: np.asarray(x)[row], together.best or together.state))
        for x, expected in zip(tree.leaves(mine[:2]), tree.leaves(fetch(alone.state)()[:2]), strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("average", "message"),
    [
        ("emma", "training.average: unknown average 'emma'; did you mean ema?"),
        ("{ema: 1}", "training.average.ema.decay: found 1, expected a number in [0, 1)"),
        ("{lookahead: {k: 5}}", "training.average.lookahead.k: unknown key"),
    ],
)
def test_the_line_of_a_wrong_average(tmp_path: Path, average: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        prepare(tmp_path, f"training.average={average}")
    assert message in str(caught.value)
