"""Influence of training examples: products of explicit gradients, and the change of a loss by a step of descent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import command
from training_runs import prepare, write_config

import adtrain as ad
from adtrain import training
from adtrain.core import tree
from adtrain.training import evaluation as module
from adtrain.training.evaluation import influence

pytestmark = pytest.mark.unfused


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> training.Experiment:
    return prepare(tmp_path_factory.mktemp("influence"), "training.precision=float64", "training.epochs=2")


@pytest.fixture(scope="module")
def model(experiment: training.Experiment) -> Any:
    state = training.run(experiment).state
    return experiment.network, state.params, state.statistics


def loss_of(model: Any, params: Any, split: Any, i: int) -> Any:
    network, _, others = model
    rows = (ad.array(np.asarray(x[i : i + 1])) for x in (split.images, split.labels))
    return network.curvature.loss(params, others, *rows)


def gradient(model: Any, split: Any, i: int) -> np.ndarray:
    grads = ad.grad(lambda params: loss_of(model, params, split, i))(model[1])
    return np.concatenate([g.numpy().ravel() for g in tree.leaves(grads)])


def test_influence_is_the_product_of_the_gradients(
    experiment: training.Experiment, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)  # one test example at a time
    train, test = experiment.train, experiment.test
    found = influence(model, train, test, 2, 3, "cpu")
    losses = [loss_of(model, model[1], test, i).item() for i in range(len(test))]
    assert [x.example for x in found] == np.argsort(losses)[::-1][:2].tolist()
    of_train = np.stack([gradient(model, train, i) for i in range(len(train))])
    for x in found:
        assert x.loss == pytest.approx(losses[x.example], rel=1e-12)
        products = of_train @ gradient(model, test, x.example)
        order = np.argsort(products)
        assert [i for i, _ in x.helpful] == order[::-1][:3].tolist()
        assert [i for i, _ in x.harmful] == order[:3].tolist()
        for i, value in (*x.helpful, *x.harmful):
            assert value == pytest.approx(products[i], rel=1e-10)


def test_a_step_on_an_example_changes_the_loss_by_its_influence(experiment: training.Experiment, model: Any) -> None:
    train, test, rate = experiment.train, experiment.test, 1e-6
    (found,) = influence(model, train, test, 1, 1, "cpu")
    for i, value in (*found.helpful, *found.harmful):
        grads = ad.grad(lambda params, i=i: loss_of(model, params, train, i))(model[1])
        moved = tree.map(lambda p, g: p - rate * g, model[1], grads)
        change = loss_of(model, moved, test, found.example).item() - found.loss
        assert change == pytest.approx(-rate * value, rel=1e-3)


def test_eval_lists_helpful_and_harmful_examples(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command("train", write_config(tmp_path), "--output-dir", run, "--device", "cpu")
    found = json.loads(command("eval", run, "--influence", "2", "--json", "--device", "cpu").stdout)["influence"]
    assert [sorted(x) for x in found] == [["example", "harmful", "helpful", "loss"]] * 2
    done = command("eval", run, "--influence", "2", "--device", "cpu")
    assert "influence: compiling, then gradients of " in done.stderr
    lines = done.stdout.splitlines()
    rows = [line for line in lines if " helps " in line or " harms " in line]
    assert len(rows) == sum(len(x["helpful"]) + len(x["harmful"]) for x in found)
    assert rows[0].split()[0] == str(found[0]["example"])


def test_a_run_without_classes_has_no_column_of_labels(tmp_path: Path) -> None:
    (tmp_path / "line.csv").write_text("x,y\n" + "".join(f"{i},{2 * i}\n" for i in range(20)))
    (tmp_path / "line.yaml").write_text(
        "name: line\n"
        f"data: {{path: {tmp_path / 'line.csv'}, header: true, target: y, test: 0.2, batch_size: 4}}\n"
        "model: {layers: [{linear: 1}]}\n"
        "loss: mse\n"
        "optimizer: {sgd: {lr: 0.0001}}\n"
        "training: {epochs: 1}\n"
    )
    run = tmp_path / "run"
    command("train", tmp_path / "line.yaml", "--output-dir", run, "--device", "cpu")
    lines = command("eval", run, "--influence", "1", "--device", "cpu").stdout.splitlines()
    assert lines[1].split() == ["test", "loss", "effect", "training", "influence"]


def test_a_run_on_equations_is_refused(tmp_path: Path) -> None:
    from test_train_equations import DECAY

    (tmp_path / "decay.yaml").write_text(DECAY)
    settings = "--set", "training.epochs=1", "--output-dir", tmp_path / "run", "--device", "cpu"
    command("train", tmp_path / "decay.yaml", *settings)
    error = command("eval", tmp_path / "run", "--influence", "2", "--device", "cpu", expect=2).stderr
    assert "influence: the run solves equations" in error
