"""A run that was stopped and resumed equals an uninterrupted one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resumed_runs import check_same, check_stops, resume_run, scores, train
from training_runs import load, prepare, write_data

from adtrain import config, training
from adtrain.core import tree
from adtrain.core.errors import AdtrainError
from adtrain.data import npz
from adtrain.data.file_array import FileArray
from adtrain.training import Experiment, Recorder, RunFolder, loop, tasks, trainer
from adtrain.training.progress import Line, ResumedAt

pytestmark = pytest.mark.unfused

LAYERS = "[linear: 8, batch_norm1d, relu, dropout: 0.2, linear: 3]"
SETTINGS = ("data.validation=0.2", "schedule=cosine", "training.epochs=4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """An experiment, and the folder of its data, its config and its run `uninterrupted`."""
    folder = tmp_path_factory.mktemp("trained")
    experiment = prepare(folder, *SETTINGS, layers=LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "REPORT_SECONDS", 0.0)
        assert train(experiment, RunFolder.create(experiment, folder / "uninterrupted"))
    return experiment, folder


@pytest.fixture
def uninterrupted(trained: tuple[Experiment, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """An experiment, trained without interruption into the folder `uninterrupted`. `stop` is called after each step."""
    experiment, folder = trained
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    return experiment


def test_a_run_stopped_at_any_point_and_resumed_has_the_same_bytes(uninterrupted: Experiment, tmp_path: Path) -> None:
    """Stopped after steps of each number within an epoch, and in evaluations: 5 and 6 have no common divisor."""
    calls = check_stops(uninterrupted, tmp_path / "uninterrupted", step=5)
    assert calls == 4 * (5 + 1) + 1  # 5 steps and the validation in each of 4 epochs, and the test


def test_a_run_stopped_after_every_step_has_the_same_bytes(uninterrupted: Experiment, tmp_path: Path) -> None:
    run = RunFolder.create(uninterrupted, tmp_path / "often")
    stops = 0
    over = train(uninterrupted, run, stop_call=0)
    while not over:
        stops += 1
        over = resume_run(run.path, uninterrupted, stop_call=0 if stops % 2 else 1)  # 1 gets past the end of an epoch
    assert stops > 15
    check_same(run.path, tmp_path / "uninterrupted")


@pytest.mark.compiled
def test_a_compiled_run_resumes_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, *SETTINGS, layers=LAYERS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    assert not train(experiment, RunFolder.create(experiment, tmp_path / "stopped"), stop_call=8)
    assert resume_run(tmp_path / "stopped", training.prepare(experiment.config))
    check_same(tmp_path / "uninterrupted", tmp_path / "stopped")


def test_any_checkpoint_alone_is_enough_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume from each checkpoint that a run writes, alone in a folder."""
    experiment = prepare(
        tmp_path,
        *SETTINGS,
        "training.checkpoint_every=3",
        "training.best_by=train_loss",
        "training.final_model=last",
        layers=LAYERS,
    )
    contents: list[bytes] = []

    def keep(recorder: Recorder, checkpoint: training.Checkpoint, best: bool) -> None:
        write(recorder, checkpoint, best)
        contents.append((recorder.folder.path / "last.safetensors").read_bytes())

    write = Recorder.checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "checkpoint", keep)
        assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    assert len(contents) == 4 + 5  # 4 ends of epochs, and steps 3, 6, 9, 12 and 18; step 15 is an end
    for i, content in enumerate(contents):
        (tmp_path / str(i)).mkdir()
        file = tmp_path / str(i) / "found.safetensors"
        file.write_bytes(content)
        _, folder, start, notes = training.resume(file)
        assert train(experiment, folder, start)
        model = (tmp_path / str(i) / "model.safetensors").read_bytes()
        assert model == (tmp_path / "uninterrupted" / "model.safetensors").read_bytes()
        lost = start.checkpoint.progress.epoch > 1 and "the best epoch so far is lost" in str(notes)
        assert bool(notes) == lost


def test_an_epochs_loss_does_not_depend_on_its_division_into_intervals() -> None:
    rng = np.random.default_rng(0)
    losses, sizes = rng.exponential(size=300).tolist(), rng.integers(1, 200, 300).tolist()
    sums = rng.exponential(size=(300, 4)).tolist()
    begun = training.Progress.start(training.Best.start("train_loss", higher=False), tasks.Multilabel(1))
    whole, parts = begun.after(losses, sums, sizes), begun
    for first, end in ((0, 1), (1, 100), (100, 263), (263, 300)):
        parts = parts.after(losses[first:end], sums[first:end], sizes[first:end])
    assert (parts.loss, parts.sums) == (whole.loss, whole.sums)


def test_a_finished_run_resumes_with_more_epochs_and_a_new_schedule(uninterrupted: Experiment, tmp_path: Path) -> None:
    run = tmp_path / "uninterrupted"
    (run / "summary.json").write_text("{}")
    with pytest.raises(AdtrainError) as error:
        training.resume(run)
    assert str(error.value) == f"{run} is finished: 4 epochs; train longer with --epochs N"
    experiment, folder, start, notes = training.resume(run, longer=["training.epochs=6"])
    assert notes == ["training.epochs: 4 -> 6"]
    assert train(experiment, folder, start)
    assert not (run / "summary.json").exists()
    assert [x.epoch for x in training.read_metrics(run) if x.kind == "epoch"] == [1, 2, 3, 4, 5, 6]
    rates = [x.learning_rate for x in training.read_metrics(run) if x.kind == "interval"]
    assert rates[3] < 0.0001 < rates[4]  # the old schedule had ended, the new one has a third left


def test_a_run_limited_by_steps_resumes_within_its_epoch(tmp_path: Path) -> None:
    cut = prepare(tmp_path, "training.steps=8", "optimizer={sgd: {lr: 0.1}}")
    assert train(cut, RunFolder.create(cut, tmp_path / "cut"))
    experiment, folder, start, _ = training.resume(tmp_path / "cut", longer=["training.steps=18"])
    assert train(experiment, folder, start)
    whole = prepare(tmp_path, "training.steps=18", "optimizer={sgd: {lr: 0.1}}")
    assert train(whole, RunFolder.create(whole, tmp_path / "whole"))
    assert scores(tmp_path / "cut")[-2:] == scores(tmp_path / "whole")[-2:]
    assert [x[1] for x in scores(tmp_path / "cut") if x[0] == "epoch"] == [1, 2, 3]


@pytest.fixture
def stopped(uninterrupted: Experiment, tmp_path: Path) -> Path:
    """The folder of a run that was stopped at the call 8 of `stop`."""
    run = RunFolder.create(uninterrupted, tmp_path / "stopped")
    assert not train(uninterrupted, run, stop_call=8)
    return run.path


def test_a_changed_config_is_listed_and_refused_without_override(stopped: Path) -> None:
    text = (stopped / "config.yaml").read_text()
    (stopped / "config.yaml").write_text(text.replace("lr: 0.01", "lr: 0.5"))
    change = "optimizer.adam.lr: 0.01 -> 0.5"
    with pytest.raises(AdtrainError) as error:
        training.resume(stopped, ["training.clip_norm=1"])
    assert str(error.value) == (
        f"{stopped}: the run was trained with another config or other data: {change}; "
        "training.clip_norm: nothing -> 1.0; undo the changes, or accept them with --override"
    )
    experiment, folder, start, notes = training.resume(stopped, changes_allowed=True)
    assert notes == [change]
    assert train(experiment, folder, start, stop_call=0) is False
    assert training.resume(stopped).notes == []  # the run's config has been replaced
    assert config.load(stopped / "config.yaml").optimizer.options()["lr"] == 0.5


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.layers.0.linear.out_features=9", "0.weight is float32[8, 36], expected float32[9, 36], 0.bias is "),
        ("optimizer={sgd: {lr: 0.1}}", "does not fit the config's network and optimizer: unexpected optimizer.exp_avg"),
        ("data.batch_size=8", "found 5 batches per epoch, expected 9 as in the config, so the run cannot continue"),
    ],
)
def test_a_changed_network_or_batch_size_is_refused_even_with_override(
    stopped: Path, setting: str, message: str
) -> None:
    before = {path.name: path.read_bytes() for path in stopped.iterdir()}
    with pytest.raises(AdtrainError) as error:
        training.resume(stopped, [setting], changes_allowed=True)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before


def test_changed_data_are_refused_without_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, *SETTINGS, layers=LAYERS)
    run = RunFolder.create(experiment, tmp_path / "stopped")
    assert not train(experiment, run, stop_call=8)
    write_data(tmp_path / "data", train=91)
    with pytest.raises(AdtrainError, match=r"the data's mean: \[0\.\d+\] -> \[0\.\d+\]; the data's std"):
        training.resume(run.path)


def test_a_change_within_a_long_list_is_not_shown_as_a_change_of_its_length(tmp_path: Path) -> None:
    def table(factor: float) -> None:
        rows = (f"{i},{i * factor},{i * 7 % 10},{i * 3 % 10},{'ab'[i % 2]}" for i in range(60))
        path.write_text("\n".join(["p,q,r,s,label", *rows]) + "\n")

    path = tmp_path / "t.csv"
    settings = ("data.label=label", "data.test=0.2", "model.input=[4]", "model.layers=[linear: 2]")
    table(1.7)
    run = RunFolder.create(experiment := prepare(tmp_path, f"data.path={path}", *settings), tmp_path / "run")
    assert not train(experiment, run, stop_call=2)
    table(1.9)
    with pytest.raises(AdtrainError, match="other data: the data's mean: other values; the data's std: other values;"):
        training.resume(run.path)


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "labels": lambda x: {"y_train": x["y_train"][::-1]},
    "order": lambda x: {"x_train": x["x_train"][::-1], "y_train": x["y_train"][::-1]},
    "one pixel": lambda x: {"x_train": x["x_train"] ^ (np.arange(64 * 36).reshape(64, 1, 6, 6) == 77)},
    "pixels of the test part": lambda x: {"x_test": 255 - x["x_test"]},
    "labels of the test part": lambda x: {"y_test": x["y_test"][::-1]},
}


@pytest.mark.parametrize("in_file", [False, True])
def test_data_with_another_label_order_or_pixel_are_refused_without_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_file: bool
) -> None:
    """Also where mean, deviation and classes are the same, and where the images stay in their file."""
    if in_file:
        monkeypatch.setattr(npz, "stays_in_file", lambda nbytes: True)
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"x_train": rng.integers(0, 256, (64, 1, 6, 6), np.uint8), "y_train": np.arange(64) % 3}
    arrays |= {"x_test": rng.integers(0, 256, (20, 1, 6, 6), np.uint8), "y_test": np.arange(20) % 3}
    path, settings = tmp_path / "data.npz", ("data.validation=0.25", "data.normalize=false")
    np.savez(path, **arrays)
    experiment = prepare(tmp_path, f"data.path={path}", *settings)
    assert isinstance(experiment.test.images, FileArray) == in_file
    run = RunFolder.create(experiment, tmp_path / "run")
    assert not train(experiment, run, stop_call=2)
    for name, change in CHANGES.items():
        np.savez(path, **arrays | change(arrays))
        part = "test" if "test" in name else "training"
        with pytest.raises(AdtrainError, match=f"other data: the {part} .* have changed.*--override") as error:
            training.resume(run.path)
        assert ("the validation" in str(error.value)) <= (part == "training"), name
    resumed = training.resume(run.path, changes_allowed=True)
    assert resumed.notes == ["the test labels have changed"]
    assert not train(resumed.experiment, resumed.folder, resumed.start, stop_call=0)
    assert training.resume(run.path).notes == []
    np.savez(path, **arrays | CHANGES["labels of the test part"](arrays))  # written again, with the same content
    assert training.resume(run.path).notes == []


def test_unfinished_files_of_a_killed_process_are_removed(uninterrupted: Experiment, stopped: Path) -> None:
    (stopped / ".last.safetensors.0123456789abcdef").write_bytes(b"half")
    (stopped / ".notes").write_text("mine")
    with (stopped / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "inter')
    assert training.read_metrics(stopped)[-1].kind == "stopped"
    assert resume_run(stopped, uninterrupted)
    assert (stopped / ".notes").exists()
    assert not (stopped / ".last.safetensors.0123456789abcdef").exists()
    assert training.read_metrics(stopped)[-1].kind == "test"


def test_two_processes_cannot_train_into_one_folder(stopped: Path) -> None:
    pytest.importorskip("fcntl")
    with RunFolder(stopped).locked(), pytest.raises(AdtrainError) as error, RunFolder(stopped).locked():
        pass
    assert str(error.value) == f"{stopped}: another process is training into this folder; wait for it"
    with RunFolder(stopped).locked():
        pass


def test_a_resumption_voids_metrics_of_later_steps(tmp_path: Path) -> None:
    score = training.ClassScore(0.5, 0.5)
    lines: list[Line] = [
        training.Interval(1, 3, score, 0.1, 9.0),
        training.Epoch(1, 5, score, None, 1.0, 9.0),
        training.Interval(2, 8, score, 0.1, 9.0),
        training.Epoch(2, 8, score, None, 1.0, 9.0),
        training.Interval(3, 9, score, 0.1, 9.0),
        ResumedAt(2, 8),
        training.Interval(2, 10, score, 0.1, 9.0),
    ]
    folder = RunFolder(tmp_path)
    for line in lines:
        folder.append_metrics(line)
    with (tmp_path / "metrics.jsonl").open("a") as unfinished:
        unfinished.write('{"kind": "epo')
    assert training.read_metrics(tmp_path) == [*lines[:3], *lines[5:]]


def test_a_warm_start_loads_only_the_weights(uninterrupted: Experiment, tmp_path: Path) -> None:
    run = tmp_path / "uninterrupted"
    model = training.model_file.load(run)
    for source in (run, run / "model.safetensors", run / "best.safetensors"):
        state = prepare(tmp_path, f"training.init_from={source}", layers=LAYERS).initial_state("cpu")
        assert int(state.step) == 0
        assert not any(x.numpy().any() for x in tree.leaves(state.optimizer))
        for x, y in zip(
            tree.leaves((state.params, state.statistics)), tree.leaves((model.params, model.statistics)), strict=True
        ):
            np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_a_warm_start_says_that_classes_or_features_have_other_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def table(name: str, header: str, classes: str) -> Path:
        rows = "".join(f"{i % 7},{i % 5},{classes[i % 2]}\n" for i in range(40))
        (tmp_path / name).write_text(f"{header},label\n{rows}")
        return tmp_path / name

    text = (
        "data: {path: PATH, test: 0.2, batch_size: 8}\nmodel: {layers: [linear: 4, linear: 2]}\nloss: cross_entropy\n"
    )
    text += "optimizer: {sgd: {lr: 0.1}}\ntraining: {epochs: 1}\n"

    def trained(path: Path, *settings: str) -> str:
        (tmp_path / "c.yaml").write_text(text.replace("PATH", str(path)))
        experiment = training.prepare(config.load(tmp_path / "c.yaml", settings))
        caplog.clear()
        training.run(experiment)
        return caplog.text

    (tmp_path / "c.yaml").write_text(text.replace("PATH", str(table("a.csv", "x,y", "ab"))))
    experiment = training.prepare(config.load(tmp_path / "c.yaml"))
    assert train(experiment, RunFolder.create(experiment, tmp_path / "run"))
    source = f"training.init_from={tmp_path / 'run'}"
    assert not trained(table("same.csv", "x,y", "ab"), source)
    other = trained(table("classes.csv", "x,y", "bc"), source)
    assert (
        "found the classes a, b, expected b, c as in the data: the last layer begins with the weights of other classes"
        in other
    )
    assert "features" not in other
    assert "found the features x, y, expected y, x as in the data" in trained(table("order.csv", "y,x", "ab"), source)
    partial = "training.init_partial=true", "model.layers=[linear: 4, linear: 3]"
    assert not trained(table("classes.csv", "x,y", "bc"), source, *partial)


def test_a_warm_start_of_another_network_is_refused_unless_partial(uninterrupted: Experiment, tmp_path: Path) -> None:
    run = tmp_path / "uninterrupted"
    layers = LAYERS.replace("linear: 3", "linear: 4, linear: 3")
    other = prepare(tmp_path, f"training.init_from={run}", layers=layers)
    with pytest.raises(AdtrainError) as error:
        RunFolder.create(other, tmp_path / "other")
    assert str(error.value) == (
        f"{run}/model.safetensors: does not fit the config's network: missing 5.weight, 5.bias; "
        "4.weight is float32[3, 8], expected float32[4, 8], 4.bias is float32[3], expected float32[4]"
    )
    assert not (tmp_path / "other").exists()
    partial = prepare(tmp_path, f"training.init_from={run}", "training.init_partial=true", layers=layers)
    model, state, drawn = (
        training.model_file.load(run),
        partial.initial_state("cpu"),
        partial.initial_state("cpu", random=True),
    )
    np.testing.assert_array_equal(state.params["0"]["weight"].numpy(), model.params["0"]["weight"].numpy())
    np.testing.assert_array_equal(state.params["4"]["weight"].numpy(), drawn.params["4"]["weight"].numpy())


def test_the_path_of_a_warm_start_is_made_absolute(
    uninterrupted: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load(tmp_path, "training.init_from=uninterrupted", layers=LAYERS)
    assert training.prepare(cfg).config.training.init_from == str(tmp_path / "uninterrupted")
    missing = prepare(tmp_path, "training.init_from=nowhere", layers=LAYERS)
    with pytest.raises(AdtrainError, match=r"nowhere: cannot be read \("):
        missing.initial_state("cpu")


def test_the_frequency_of_state_copies_and_log_readings_does_not_change_the_result(
    uninterrupted: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "COPY_SHARE", 1e9)
    monkeypatch.setattr(trainer, "LOG_ROWS", 2)
    assert train(uninterrupted, RunFolder.create(uninterrupted, tmp_path / "marked"))
    check_same(tmp_path / "marked", tmp_path / "uninterrupted")
