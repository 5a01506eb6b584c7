"""Each score has one definition: losses with class weights, and metrics in all the places that show them."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep_runs import run as sweep_run
from training_runs import prepare

import adtrain as ad
from adtrain import config, metrics, training
from adtrain.config import sweep_section
from adtrain.core import tree
from adtrain.metrics import ByClass
from adtrain.report import classes, pages, tables
from adtrain.report import predictions as reported
from adtrain.report.tables import LabelPredictions, NumberPredictions
from adtrain.sweeps import finished
from adtrain.sweeps.session import prepared
from adtrain.training import Experiment, Score, TrainState, evaluation, model_file, scores
from adtrain.training.evaluation import predictions
from adtrain.training.summary import read_summary

pytestmark = pytest.mark.unfused

WEIGHTED = {
    "cross_entropy": "{cross_entropy: {weight: [1, 9, 0]}}",
    "nll": "{nll: {weight: [1, 9, 0]}}",
    "smoothed": "{cross_entropy: {weight: [1, 9, 0.5], label_smoothing: 0.2}}",
}


def loss_of(experiment: Experiment, state: TrainState, rows: np.ndarray) -> float:
    """The loss of these rows of the test part."""
    examples = training.on_device(experiment.test.take(rows), "cpu")
    step, task = experiment.evaluation_step, experiment.network.task
    return training.Evaluation(step, task, examples).score(state.params, state.statistics).loss


@pytest.mark.parametrize("loss", WEIGHTED)
def test_a_weighted_loss_is_the_weighted_mean_over_the_rows_in_any_order_and_division(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    layers = "[linear: 3, log_softmax]" if loss == "nll" else "[linear: 3]"
    experiment = prepare(tmp_path, f"loss={WEIGHTED[loss]}", layers=layers)
    state, options = experiment.initial_state("cpu"), experiment.config.loss.options()
    test = experiment.test
    log_p = np.log(predictions(experiment.network, state.params, state.statistics, test.images, "cpu").astype(float))
    share, weights = options.get("label_smoothing", 0.0), np.array(options["weight"])
    picked = weights[test.labels] * log_p[np.arange(len(test)), test.labels]
    expected = -((1 - share) * picked + share * (log_p * weights).mean(axis=1)).sum() / weights[test.labels].sum()
    by_class, mixed = np.argsort(test.labels, kind="stable"), np.arange(len(test))
    for batch_size in (250, 7):
        monkeypatch.setattr(evaluation, "BATCH_SIZE", batch_size)
        assert loss_of(experiment, state, mixed) == pytest.approx(expected, rel=1e-6)
        assert loss_of(experiment, state, by_class) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("settings", [[], ["data.shards=4"]])
def test_batches_of_a_class_with_weight_0_change_no_weights(tmp_path: Path, settings: list[str]) -> None:
    loss = "loss={cross_entropy: {weight: [0, 0, 1]}}"
    experiment = prepare(tmp_path, loss, "data.batch_size=4", "optimizer={sgd: {lr: 0.1}}", *settings)
    of_class_0 = np.flatnonzero(experiment.train.labels == 0)
    train = experiment.train.take(of_class_0)
    alone = replace(experiment, data=experiment.data.with_train(train), steps_per_epoch=8, total_steps=8)
    before = tree.leaves(alone.initial_state("cpu"))
    result = training.run(alone)
    assert result.train.loss == 0.0
    for x, y in zip(before[:-1], tree.leaves(result.state)[:-1], strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_the_loss_of_examples_that_all_have_weight_0_is_0(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "loss={cross_entropy: {weight: [0, 0, 1]}}")
    assert loss_of(experiment, experiment.initial_state("cpu"), np.flatnonzero(experiment.test.labels == 1)) == 0.0


def test_the_weighted_gradient_of_shards_is_that_of_the_batch(tmp_path: Path) -> None:
    """Rows are sorted by class, so that shards have other classes."""
    moved = []
    for shards in (1, 4):
        settings = ("training.steps=1", "data.batch_size=90", "optimizer={sgd: {lr: 0.5}}", f"data.shards={shards}")
        experiment = prepare(tmp_path, "loss={cross_entropy: {weight: [1, 9, 0]}}", *settings)
        order = np.argsort(experiment.train.labels, kind="stable")
        experiment = replace(experiment, data=experiment.data.with_train(experiment.train.take(order)))
        result = training.run(experiment)
        moved.append((result.train.loss, tree.leaves(result.state.params)))
    (loss, whole), (of_shards, sharded) = moved
    assert of_shards == pytest.approx(loss, rel=1e-6)
    for x, y in zip(whole, sharded, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, atol=1e-7)


def rmse_mae_r2(true: list[float], predicted: list[float]) -> tuple[float, float, float]:
    count = len(true)
    errors = [a - b for a, b in zip(true, predicted, strict=True)]
    mean = fsum(true) / count
    squared, spread = fsum(e * e for e in errors), fsum((x - mean) ** 2 for x in true)
    r2 = float(squared == 0) if len(set(true)) == 1 else 1 - squared / spread
    return (squared / count) ** 0.5, fsum(map(abs, errors)) / count, r2


def evaluated(run: Path) -> Score:
    """The score of a run as `adtrain eval` computes it."""
    model = model_file.load(run)
    examples, task = training.on_device(model.test_split(), "cpu"), model.network.task
    return training.Evaluation(model.evaluation_step, task, examples).score(model.params, model.statistics)


HOSTILE = {
    "plain": (0.0, 1.0, 0.0, 1.0, 40),
    "far from 0": (1e7, 0.005, 1e7, 0.005, 40),
    "test part far from the training part": (0.5, 0.3, 1e7, 0.005, 40),
    "constant": (5.3, 0.0, 5.3, 0.0, 40),
    "constant test part": (5.3, 1.0, 5.3, 0.0, 40),
    "tiny": (1e-30, 1e-32, 1e-30, 1e-32, 40),
    "large": (1e15, 1e15, 1e15, 1e15, 40),
    "one row": (0.0, 1.0, 0.0, 1.0, 1),
}
"""Mean and deviation of the training targets and of the test targets, and the number of test rows."""


@pytest.mark.parametrize(
    ("targets", "normalized"),
    [
        pytest.param(targets, i % 2 == 0, marks=() if i < 4 else pytest.mark.exhaustive)
        for i, targets in enumerate(HOSTILE)
    ],
)
def test_summary_report_evaluation_sweep_and_python_show_the_same_scores(
    tmp_path: Path, targets: str, normalized: bool
) -> None:
    mean, deviation, test_mean, test_deviation, rows = HOSTILE[targets]
    rng = np.random.default_rng(0)
    inputs, test_inputs = rng.normal(size=(64, 3)).astype(np.float32), rng.normal(size=(rows, 3)).astype(np.float32)
    labels, test_labels = inputs[:, 0] * deviation + mean, test_inputs[:, 0].astype(float) * test_deviation + test_mean
    values: dict[str, Any] = {
        "data": {"batch_size": 16, "normalize_targets": normalized},
        "model": {"layers": [{"linear": 1}]},
        "loss": "mse",
        "optimizer": {"sgd": {"lr": 0.05 if normalized else 1e-30}},
        "training": {"epochs": 2},
    }
    data = (inputs, labels.astype(float)), (test_inputs, test_labels)
    trained = ad.train(values, data[0], test_data=data[1], output_dir=tmp_path / "run", device="cpu", progress=False)
    found = trained.test._asdict()
    true, predicted = test_labels.tolist(), trained.model.predict_values(test_inputs)[:, 0].tolist()
    expected = dict(zip(("rmse", "mae", "r2"), rmse_mae_r2(true, predicted), strict=True))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert summary.test == evaluated(tmp_path / "run") == trained.test
    shown = reported.predict(tmp_path / "run", "cpu")
    assert isinstance(shown, NumberPredictions)
    assert tuple(float(x) for (x,) in shown.scores) == trained.test[1:]
    (row,) = tables.by_target(shown)
    cells = dict(zip(tables.target_columns(shown), row, strict=True))
    assert {name: cells[name] for name in expected} == {name: scores.value_text(name, found[name]) for name in expected}
    session = prepared(config.load(tmp_path / "run/config.yaml", ["sweep={training.seed: [0, 1]}"]), "cpu")
    sweep = sweep_run(session, tmp_path / "sweep")
    best = sweep.run().members[0]
    assert evaluated(finished.write_run(session, sweep.folder, None)) == best.test


TASKS: dict[str, dict[str, Any]] = {
    "classes": {"model": {"layers": [{"linear": 3}]}, "loss": "cross_entropy"},
    "labels": {"model": {"layers": [{"linear": 3}]}, "loss": "binary_cross_entropy_with_logits"},
    "text": {
        "data": {"batch_size": 4, "length": 5, "test": 0.3},
        "model": {"layers": [{"embedding": {"num_embeddings": 4, "embedding_dim": 3}}, {"linear": 4}]},
        "loss": "cross_entropy",
    },
}


@pytest.mark.parametrize("task", TASKS)
def test_summary_report_evaluation_sweep_and_python_show_the_same_scores_of_classes_labels_and_text(
    tmp_path: Path, task: str
) -> None:
    rng, run = np.random.default_rng(0), tmp_path / "run"
    values = {"optimizer": {"sgd": {"lr": 0.1}}, "training": {"epochs": 2}, "data": {"batch_size": 16}, **TASKS[task]}
    options: dict[str, Any] = {"output_dir": run, "device": "cpu", "progress": False}
    if task == "text":
        (tmp_path / "x.txt").write_text("".join(rng.choice(list("abcd"), 300)))
        trained = ad.train(values | {"data": {**values["data"], "path": str(tmp_path / "x.txt")}}, **options)
    else:
        images = rng.normal(size=(97, 4)).astype(np.float32)
        labels = images[:, :3].argmax(axis=1) if task == "classes" else (images[:, :3] > 0).astype(float)
        if task == "classes":
            values["training"] = {"epochs": 2, "metrics": ["f1"]}
        trained = ad.train(values, (images[:50], labels[:50]), test_data=(images[50:], labels[50:]), **options)
    summary, found = read_summary(run), trained.test._asdict()
    assert summary is not None
    assert summary.test == evaluated(run) == trained.test
    shown = dict(pages.results("test", summary.test))
    assert shown == {f"test {name}": scores.value_text(name, value) for name, value in found.items()}
    predicted = reported.predict(run, "cpu")
    if isinstance(predicted, LabelPredictions):
        assert predicted.counts.f1.mean() == found["f1"]
    elif isinstance(predicted, reported.Predictions):
        assert predicted.correct / len(predicted.labels) == found["accuracy"]
        by_class = metrics.class_counts(predicted.confusion).f1
        assert summary.metrics["f1"] == ByClass(by_class.mean(), dict(zip("012", by_class, strict=True)))
    overrides = ["sweep={training.seed: [0, 1]}", *(["training.metrics=null"] if task == "classes" else [])]
    session = prepared(config.load(run / "config.yaml", overrides), "cpu")
    sweep = sweep_run(session, tmp_path / "sweep")
    best = sweep.run().members[0]
    assert evaluated(finished.write_run(session, sweep.folder, None)) == best.test


def test_the_accuracy_of_a_class_in_a_report_is_its_recall() -> None:
    labels = np.zeros(10, np.int64)
    predicted = np.eye(2)[[0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    (row,) = classes.by_class(reported.Predictions(np.zeros((10, 1, 1, 1)), labels, ("a", "b"), predicted))
    recall = metrics.METRICS["recall"](metrics.ClassPredictions(predicted, labels, ("a", "b")))
    assert isinstance(recall, ByClass)
    assert row.accuracy == recall.by_class["a"]


def test_every_score_of_a_task_has_a_scale_and_ranks_members() -> None:
    for kind in scores.KINDS:
        for name in kind._fields:
            assert name in metrics.SCALES
            assert sweep_section.METRIC.fullmatch(f"test_{name}")


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "binary_cross_entropy_with_logits"])
def test_the_accuracy_is_the_share_of_correct_predictions(tmp_path: Path, loss: str) -> None:
    """Also where outputs exceed 1, or their sigmoid is 1: the first of several most probable classes is predicted."""
    experiment = prepare(tmp_path, f"loss={loss}", "training.epochs=1")
    state = experiment.initial_state("cpu")
    state = state._replace(params=tree.map(lambda x: ad.array(x.numpy() * 40), state.params))
    examples = training.on_device(experiment.test, "cpu")
    step, task = experiment.evaluation_step, experiment.network.task
    score = training.Evaluation(step, task, examples).score(state.params, state.statistics)
    rows = predictions(experiment.network, state.params, state.statistics, experiment.test.images, "cpu")
    assert score._asdict()["accuracy"] == (rows.argmax(axis=1) == experiment.test.labels).mean()
