"""The best epoch, early stopping and metrics of the members of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import command
from sweep_runs import SGD, after, bytes_of, run, session, trained

from adtrain import training
from adtrain.core.errors import AdtrainError
from adtrain.metrics import METRICS, ByClass, ClassPredictions
from adtrain.sweeps import finished, wave
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import SweepResults
from adtrain.sweeps.session import Session, SweepInterrupted, SweepRun
from adtrain.training import model_file, read_metrics
from adtrain.training.evaluation import predictions
from adtrain.training.progress import Epoch

PATIENCE, MIN_DELTA, EPOCHS = 2, 0.01, 9
SWEEP = "{optimizer.sgd.lr: [0.3, 0.05, 1.0e-3, 1.0e+30], training.seed: [3, 4]}"
STOPPING = f"training.early_stopping={{patience: {PATIENCE}, min_delta: {MIN_DELTA}}}"
SETTINGS = (
    *(SGD, "data.validation=0.2", "data.batch_size=8", f"training.epochs={EPOCHS}", STOPPING),
    *("training.metrics=[f1, confusion]", "training.best_by=validation_loss"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return session(tmp_path_factory.mktemp("data"), SWEEP, *SETTINGS)


@pytest.fixture(scope="module")
def whole(found: Session, tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepFolder, SweepResults]:
    trained = run(found, tmp_path_factory.mktemp("whole") / "s")
    return trained.folder, trained.run()


def losses(folder: SweepFolder, member: int) -> list[float]:
    """The validation losses of a member that has not failed, by epoch."""
    scored = [x for line in folder.lines() for x in line.members if x.member == member]
    assert all(x.validation is not None for x in scored)
    return [x.validation.loss for x in scored if x.validation is not None]


def stop_epoch(losses: list[float]) -> int:
    """The epoch after which early stopping ends a training with these losses."""
    to_beat, waited = np.inf, 0
    for epoch, loss in enumerate(losses, 1):
        to_beat, waited = (loss, 0) if to_beat - loss > MIN_DELTA else (to_beat, waited + 1)
        if waited == PATIENCE:
            return epoch
    return EPOCHS


def test_members_stop_when_their_loss_has_not_improved_and_end_with_their_best_epoch(
    whole: tuple[SweepFolder, SweepResults], found: Session
) -> None:
    folder, results = whole
    ended = [x for x in results.members if x.status == "finished"]
    assert len(ended) == 6
    assert len({x.epochs for x in ended}) > 1
    assert any(x.model_epoch != x.epochs for x in ended)
    ((group, state),) = finished.final_states(found, folder)
    for x in ended:
        of_member = losses(folder, x.member)
        assert x.epochs == len(of_member) == stop_epoch(of_member)
        assert x.model_epoch == int(np.argmin(of_member)) + 1
        assert x.validation is not None
        assert x.value == x.validation.loss == min(of_member)
    best = ended[0]
    until_best = trained(group, group.members, best.model_epoch)
    assert bytes_of(state, best.member) == bytes_of(until_best, best.member)


def test_the_run_of_a_member_is_that_of_a_training_alone(
    whole: tuple[SweepFolder, SweepResults], found: Session, tmp_path: Path
) -> None:
    folder, results = whole
    best = results.members[0]
    path = finished.write_run(found, folder, best.member)
    written = json.loads((path / "summary.json").read_text())
    experiment = training.prepare(found.members[best.member].config)
    alone = training.run(experiment)
    assert (written["ended"], written["epochs"], written["model_epoch"], written["steps"]) == (
        alone.ended, alone.epochs, alone.best.epoch, alone.steps
    )  # fmt: skip
    assert written["best"]["value"] == pytest.approx(alone.best.value, rel=1e-3)
    assert written["test"]["loss"] == pytest.approx(alone.test.loss, rel=1e-3)
    assert set(written["metrics"]) == set(alone.metrics)
    epochs = [x for x in read_metrics(path) if isinstance(x, Epoch)]
    assert [x.epoch for x in epochs] == list(range(1, alone.epochs + 1))
    assert all(set(x.metrics) == {"f1"} for x in epochs)
    assert (path / "config.yaml").read_text() == experiment.config_text


def test_the_metrics_of_a_member_are_those_of_its_predictions(
    whole: tuple[SweepFolder, SweepResults], found: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, results = whole
    for x in (results.members[0], results.members[5]):
        model = model_file.load(finished.write_run(found, folder, x.member))
        test = model.test_split(None)
        rows = predictions(model.network, model.params, model.statistics, test.images, "cpu")
        given = ClassPredictions(rows, test.labels, model.classes)
        f1 = METRICS["f1"](given)
        assert isinstance(f1, ByClass)
        assert x.metrics["f1"] == f1
        assert x.metrics["confusion"] == METRICS["confusion"](given)
    monkeypatch.setattr(wave, "MOST_PREDICTION_BYTES", 1)  # one member after the other
    again = run(found, tmp_path / "s").run()
    assert {x.member: x.metrics for x in again.members} == {x.member: x.metrics for x in results.members}


def test_the_curvature_of_a_member_is_that_of_its_run(tmp_path: Path) -> None:
    metrics = "training.metrics=[top_eigenvalues: 2, f1, gradient_noise]"
    found = session(tmp_path, SWEEP, SGD, "data.validation=0.2", "training.epochs=1", metrics)
    folder = SweepFolder.create(found.config, found.options(False, "validation_gradient_noise"), tmp_path / "s", {})
    results = SweepRun(found, folder, found.plans()).run()
    values = [x.value for x in results.members if x.value is not None]
    assert len(values) == 6
    assert values == sorted(values)
    for x in results.members[:2]:
        assert list(x.metrics) == ["top_eigenvalues", "f1", "gradient_noise"]
        path = finished.write_run(found, folder, x.member)
        again = json.loads(command("eval", path, "--json", "--device", "cpu").stdout)["metrics"]
        for name in ("top_eigenvalues", "gradient_noise"):
            assert x.metrics[name] == pytest.approx(again[name], rel=1e-4)


@pytest.mark.compiled
def test_a_sweep_with_early_stopping_that_is_stopped_at_any_call_and_resumed_has_the_same_bytes(
    whole: tuple[SweepFolder, SweepResults], found: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wave, "REPORT_SECONDS", 0.0)
    folder, expected = whole
    for calls in (1, 12, 20):
        with pytest.raises(SweepInterrupted):
            run(found, tmp_path / "s", at_once=4, stop=after(calls)).run()
    results = run(found, tmp_path / "s", at_once=8).run()
    assert results.members == expected.members
    (file,), (again,) = (list(x.glob("*.safetensors")) for x in (folder.states.folder, tmp_path / "s/states"))
    assert file.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("metric", ["validation_f1", pytest.param("test_top5", marks=pytest.mark.exhaustive)])
def test_members_are_ranked_by_any_metric(tmp_path: Path, metric: str) -> None:
    found = session(tmp_path, SWEEP, SGD, "data.validation=0.2", "training.epochs=2", "training.metrics=[precision]")
    folder = SweepFolder.create(found.config, found.options(True, metric), tmp_path / "s", found.digests)
    results = SweepRun(found, folder, found.plans()).run()
    part, _, name = metric.partition("_")
    finished = [x for x in results.members if x.status == "finished"]
    assert len(finished) == 4
    values = [x.value for x in finished if x.value is not None]
    assert values == sorted(values, reverse=True)
    assert all({"precision", name} == set(x.metrics) for x in finished)
    if part == "test":
        assert values == [x.metrics[name] for x in finished]
    assert SweepFolder.open(tmp_path / "s").results() == results
    command("report", tmp_path / "s", "--device", "cpu")


def test_a_metric_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    found = session(tmp_path, SWEEP, SGD)
    for metric, message in {
        "train_f1": "expected train_, validation_ or test_ with one of loss, accuracy, or validation_ or test_ with",
        "validation_f1": "found validation_f1, expected data.validation above 0 for it",
        "test_confusion": "found 'test_confusion', expected",
    }.items():
        with pytest.raises(AdtrainError, match=f"^--by: .*{message}"):
            found.options(False, metric)
    found.options(False, "test_f1")
    with pytest.raises(AdtrainError, match=r"^--by: found validation_f1, expected data.validation above 0 for it, by"):
        found.options(True, "test_f1")
