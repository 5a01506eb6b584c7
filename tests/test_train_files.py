from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from training_runs import prepare

from adtrain import config, training
from adtrain.core import tree
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.training import Experiment, Recorder, RunFolder, TrainState, checkpoint, model_file
from adtrain.training.progress import ResumedAt

pytestmark = pytest.mark.unfused

CONVOLUTIONAL = "[conv2d: {out_channels: 2, kernel_size: 3}, batch_norm2d, flatten, linear: 3]"


def train_into(folder: Path, experiment: Experiment) -> training.Result:
    recorder = Recorder(RunFolder.create(experiment, folder), experiment)
    result = training.run(experiment, observers=[recorder])
    recorder.finished(result)
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a config, and the run that was trained from them."""
    folder = tmp_path_factory.mktemp("trained")
    settings = "model.input=[1, 6, 6]", "training.epochs=1"
    train_into(folder / "run", prepare(folder, *settings, layers=CONVOLUTIONAL))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The folder of a finished run whose model has running statistics."""
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True) / "run"


def test_tensors_in_the_model_file_have_pytorch_names(run: Path) -> None:
    tensors = safetensors_numpy.load_file(run / "model.safetensors")
    assert sorted(tensors) == [
        "0.bias", "0.weight", "1.bias", "1.running_mean", "1.running_var", "1.weight", "3.bias", "3.weight"
    ]  # fmt: skip


def test_a_loaded_model_equals_the_saved_one(run: Path, tmp_path: Path) -> None:
    experiment = training.prepare(config.load(run / "config.yaml"))
    result = training.run(experiment)
    trained = model_file.load(run)
    saved = tree.leaves((result.state.params, result.state.statistics))
    for a, b in zip(saved, tree.leaves((trained.params, trained.statistics)), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert (trained.classes, trained.image_shape) == (("0", "1", "2"), (1, 6, 6))
    assert (trained.network.mean, trained.network.std) == (experiment.network.mean, experiment.network.std)
    examples = training.on_device(experiment.test, "cpu")
    evaluation = training.Evaluation(trained.evaluation_step, trained.network.task, examples)
    assert evaluation.score(trained.params, trained.statistics) == result.test


def test_the_resolved_config_trains_to_the_same_bytes(run: Path, tmp_path: Path) -> None:
    train_into(tmp_path / "again", training.prepare(config.load(run / "config.yaml")))
    for name in ("config.yaml", "model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.exhaustive
def test_another_process_writes_the_same_bytes(run: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from adtrain import config, training\n"
        "experiment = training.prepare(config.load(sys.argv[1]))\n"
        "folder = training.RunFolder.create(experiment, Path(sys.argv[2]))\n"
        "training.run(experiment, observers=[training.Recorder(folder, experiment)])\n"
    )
    for seed in ("77", "78"):
        command = [sys.executable, "-c", script, str(run / "config.yaml"), str(tmp_path / seed)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    first, second = ((tmp_path / seed / "model.safetensors").read_bytes() for seed in ("77", "78"))
    assert first == second


def test_metrics_are_one_object_a_line(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["interval", "epoch", "test"]
    interval, epoch, test = records
    assert set(interval) == {"kind", "epoch", "step", "train", "learning_rate", "images_per_second"}
    assert set(epoch) == {"kind", "epoch", "step", "train", "validation", "seconds", "images_per_second", "metrics"}
    assert set(test) == {"kind", "epoch", "step", "test", "metrics"}
    assert set(epoch["train"]) == {"loss", "accuracy"}


def test_a_run_goes_to_a_new_folder_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert [str(RunFolder.create(experiment).path) for _ in range(3)] == ["runs/tiny", "runs/tiny-2", "runs/tiny-3"]


def test_a_folder_that_holds_a_run_is_refused_and_unchanged(run: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(AdtrainError) as error:
        RunFolder.create(prepare(tmp_path), run)
    assert str(error.value) == (
        f"{run}: already holds a run (config.yaml, metrics.jsonl, model.safetensors, last.safetensors, "
        "best.safetensors); "
        "give another output folder, or remove that run first"
    )
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = prepare(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for folder in ("mine", "new"):
        with pytest.raises(AdtrainError) as error:
            RunFolder.create(experiment, tmp_path / folder)
        path, size = tmp_path / folder / "config.yaml", len(experiment.config_text.encode())
        assert str(error.value) == f"{path}: cannot be written (No space left on device); it needs {size} B"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "new").exists()


def test_only_one_of_two_runs_started_in_one_folder_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = prepare(tmp_path)
    first = RunFolder.create(experiment, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    monkeypatch.setattr(RunFolder, "files", lambda folder: [])  # the second run checks before the first has written
    with pytest.raises(AdtrainError, match=r"metrics\.jsonl: cannot be written \(File exists\)"):
        RunFolder.create(experiment, tmp_path / "run")
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before


def test_a_full_disk_leaves_no_partial_metrics_line(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs a limit on the size of files")
    folder = RunFolder.create(prepare(tmp_path), tmp_path / "run")
    folder.append_metrics(ResumedAt(1, 1))
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(AdtrainError, match=r"metrics\.jsonl: cannot be written \(File too large\)"):
            folder.append_metrics(ResumedAt(1, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert metrics.read_bytes() == before


def test_other_files_in_the_folder_are_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep me")
    RunFolder.create(prepare(tmp_path), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "notes.txt"]


def test_a_folder_that_cannot_be_created_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = prepare(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(AdtrainError, match=r"/file: found a file, expected a folder or nothing$"):
        RunFolder.create(experiment, tmp_path / "file")
    with pytest.raises(AdtrainError, match=r"/file/below: cannot be written \(Not a directory\)$"):
        RunFolder.create(experiment, tmp_path / "file" / "below")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(AdtrainError, match=r"^runs/tiny: cannot be written \(Not a directory\)$"):
        RunFolder.create(experiment)


def test_a_run_that_diverges_leaves_the_last_good_model(tmp_path: Path) -> None:
    """The rate is 1e-3 in the first epoch and about 1e30 in the second."""
    schedule = "schedule={step: {step_size: 1, gamma: 1.0e+33}}"
    experiment = prepare(tmp_path, "optimizer={sgd: {lr: 0.001}}", schedule)
    with pytest.raises(AdtrainError, match=r"^the loss is nan at step 8 \(epoch 2\), first the result of matmul in "):
        train_into(tmp_path / "run", experiment)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["interval", "epoch", "stopped"]
    params = model_file.load(tmp_path / "run").params
    assert all(np.isfinite(x.numpy()).all() for x in tree.leaves(params))


def _without(name: str) -> Any:
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("3.weight"), "missing 3.weight"),
        (lambda t: {**t, "9.bias": t["3.bias"]}, "unexpected 9.bias"),
        (
            lambda t: {**t, "3.weight": t["3.weight"][:, :5].copy()},
            "3.weight is float32[3, 5], expected float32[3, 32]",
        ),
        (
            lambda t: {**t, "3.bias": t["3.bias"].astype(np.float64)},
            "3.bias is float64[3], expected float32[3]",
        ),
    ],
)
def test_arrays_of_another_model_are_refused(run: Path, change: Any, message: str) -> None:
    path = run / "model.safetensors"
    tensors = safetensors_numpy.load_file(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    path.write_bytes(safetensors_numpy.save(change(tensors), metadata))
    with pytest.raises(AdtrainError) as error:
        model_file.load(run)
    assert str(error.value) == f"{path}: does not fit the model of config.yaml: {message}"


UNFIT = "found metadata that do not fit the model of config.yaml, train again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"std": [0.0]}, "metadata: std[0]: found 0.0, expected a number in (0, 3.4e38]"),
        ({"mean": [float("nan")]}, "metadata: mean[0]: found nan, expected a number in [-3.4e38, 3.4e38]"),
        ({"mean": [0.1, 0.2]}, UNFIT),
        ({"mean": [1e300]}, "metadata: mean[0]: found 1e+300, expected a number in [-3.4e38, 3.4e38]"),
        ({"std": [1e-300]}, UNFIT),
        ({"scale": 3}, UNFIT),
        ({"image_shape": [1, 3, 3]}, UNFIT),
        ({"image_shape": [36]}, "metadata: found no key image_shape[1], expected a file that adtrain wrote"),
        ({"mean": "x"}, "metadata: mean: found 'x', expected a valid array"),
        ({"classes": [1]}, "metadata: classes[0]: found 1, expected a valid string"),
    ],
)
def test_metadata_that_do_not_fit_the_model_are_refused(run: Path, change: dict[str, Any], message: str) -> None:
    path = run / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    about = json.loads(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]["adtrain"])
    tensors = safetensors_numpy.load_file(path)
    path.write_bytes(safetensors_numpy.save(tensors, {"adtrain": json.dumps({**about, **change})}))
    with pytest.raises(AdtrainError) as error:
        model_file.load(run)
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as safetensors ("),
        (b"not a model at all", "cannot be read as safetensors ("),
        (safetensors_numpy.save({"a": np.zeros(2)}), "found no adtrain metadata"),
        (safetensors_numpy.save({"a": np.zeros(2)}, {"adtrain": "{"}), "metadata: found no valid JSON"),
        (safetensors_numpy.save({"a": np.zeros(2)}, {"adtrain": "{}"}), "metadata: found no key version, expected"),
        (safetensors_numpy.save({"a": np.zeros(2)}, {"adtrain": "[1]"}), "metadata: found [1], expected an object"),
    ],
)
def test_a_damaged_model_file_is_a_one_line_error(run: Path, content: bytes, message: str) -> None:
    path = run / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdtrainError) as error:
        model_file.load(run)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_a_truncated_model_file_is_a_one_line_error(run: Path) -> None:
    path = run / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(AdtrainError, match=r"model.safetensors: cannot be read as safetensors \("):
        model_file.load(run)


def test_loading_a_path_without_a_run_is_a_one_line_error(run: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none", "found nothing, expected the folder of a run"),
        (tmp_path / "tiny.yaml", "found a file, expected the folder of a run"),
        (tmp_path / "data", "found no config.yaml, expected the folder of a run of adtrain train"),
    ):
        with pytest.raises(AdtrainError) as error:
            model_file.load(path)
        assert str(error.value) == f"{path}: {message}"
    (run / "model.safetensors").unlink()
    with pytest.raises(AdtrainError, match=r"found no model\.safetensors; the run ended before its first checkpoint"):
        model_file.load(run)


def test_a_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(AdtrainError) as error:
            write_atomic(path, b"new")
    assert str(error.value) == f"{path}: cannot be written (No space left on device); it needs 3 B"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_file_that_is_the_same_as_another_one_is_a_link_to_it(tmp_path: Path) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    write_atomic(last, b"first")
    write_atomic(best, b"first", same_as=last)
    write_atomic(best, b"first", same_as=last)
    assert best.samefile(last)
    write_atomic(last, b"second")
    assert (last.read_bytes(), best.read_bytes()) == (b"second", b"first")
    best.chmod(0o600)
    write_atomic(best, b"second", same_as=last)
    assert (best.read_bytes(), best.stat().st_mode & 0o777) == (b"second", 0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last"]


def test_a_file_is_written_twice_where_the_system_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    write_atomic(tmp_path / "last", b"new")
    write_atomic(tmp_path / "best", b"new", same_as=tmp_path / "last")
    assert (tmp_path / "best").read_bytes() == b"new"
    assert not (tmp_path / "best").samefile(tmp_path / "last")


def test_the_model_is_written_once_for_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = RunFolder.write_model

    def counted(*arguments: Any) -> None:
        written.append(arguments)
        write(*arguments)

    monkeypatch.setattr(RunFolder, "write_model", counted)
    train_into(tmp_path / "run", prepare(tmp_path, "training.epochs=3"))
    assert len(written) == 3
    early = "training.early_stopping={patience: 1}", "training.best_by=validation_loss", "data.validation=0.25"
    result = train_into(
        tmp_path / "early", prepare(tmp_path, "training.epochs=9", "optimizer={sgd: {lr: 3.0}}", *early)
    )
    assert result.restored
    assert len(written) == 3 + result.epochs + 1


def test_written_files_respect_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_encoding_an_initial_state_is_deterministic(tmp_path: Path) -> None:
    experiment = prepare(tmp_path)
    state: TrainState = checkpoint.fetch(experiment.initial_state("cpu"))()
    assert model_file.encode(experiment, state) == model_file.encode(experiment, state)
