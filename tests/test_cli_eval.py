from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from command_line import invoke
from idx_files import write_idx
from npz_files import write_npz
from PIL import Image
from report_runs import one_line
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from training_runs import images_of, write_config, write_data

pytestmark = pytest.mark.unfused


def run(*arguments: str, expect: int = 0) -> Result:
    result = invoke(*arguments, "--device", "cpu")
    assert result.exit_code == expect, result.stderr
    return result


def train(cfg: Path, folder: Path, *options: str) -> None:
    run("train", str(cfg), "--output-dir", str(folder), *options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a finished run in `run`."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_config(folder), folder / "run", "--epochs", "8")
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


@pytest.mark.compiled
def test_eval_reproduces_the_score_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(write_config(tmp_path), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("eval", "run", "--json").stdout)
    assert list(found) == ["run", "model_epoch", "device", "images", "test", "metrics", "seconds", "images_per_second"]
    assert found["test"] == json.loads(Path("run/summary.json").read_text())["test"]
    assert found["images"] == 30
    text = run("eval", "run").stdout.splitlines()
    assert text[0] == f"test    loss {found['test']['loss']:.4f}, accuracy {found['test']['accuracy']:.2%} of 30 images"


def test_eval_of_a_path_without_a_run_is_a_one_line_error(here: Path) -> None:
    assert one_line(run("eval", "none", expect=2)) == "none: found nothing, expected the folder of a run"
    assert one_line(run("eval", "data", expect=2)) == (
        "data: found no config.yaml, expected the folder of a run of adtrain train"
    )


def test_a_run_named_without_its_folder_gets_a_hint(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(here / "run", tmp_path / "runs" / "digits")
    monkeypatch.chdir(tmp_path)
    error = one_line(run("eval", "digits", expect=2))
    assert error == "digits: found nothing, expected the folder of a run; did you mean runs/digits?"


def test_eval_without_the_data_is_a_one_line_error(tmp_path: Path) -> None:
    cfg = write_config(tmp_path)
    train(cfg, tmp_path / "run", "--steps", "1")
    (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
    line = one_line(run("eval", str(tmp_path / "run"), expect=2))
    assert line.startswith(f"{tmp_path}/data: found no file t10k-labels")


def test_predict_classifies_an_idx_file(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    labels = np.array([2, 0, 1, 1])
    path = write_idx(tmp_path / "images.gz", images_of(labels, seed=9))
    rows = json.loads(run("predict", "run", str(path), "--json").stdout)
    assert [row["class"] for row in rows] == ["2", "0", "1", "1"]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert {key for row in rows for key in row} == {"file", "index", "class", "probability"}
    assert all(1 / 3 < row["probability"] <= 1 for row in rows)
    lines = run("predict", "run", str(path)).stdout.splitlines()
    assert lines[0].split() == ["input", "class", "probability"]
    assert lines[1].split() == [f"{path}[0]", "2", f"{rows[0]['probability']:.2%}"]


def test_predict_prints_the_most_probable_classes(here: Path, tmp_path: Path) -> None:
    path = str(write_idx(tmp_path / "images", images_of(np.array([2, 0]), seed=9)))
    best = json.loads(run("predict", "run", path, "--json").stdout)
    rows = json.loads(run("predict", "run", path, "--json", "--top-k", "9").stdout)
    for row, first in zip(rows, best, strict=True):
        assert row["top"][0] == {name: first[name] for name in ("class", "probability")}
        assert sorted(x["class"] for x in row["top"]) == ["0", "1", "2"]
        probabilities = [x["probability"] for x in row["top"]]
        assert probabilities == sorted(probabilities, reverse=True)
    lines = run("predict", "run", path, "--top-k", "2").stdout.splitlines()
    assert lines[0].split() == ["input", "rank", "class", "probability"]
    assert len(lines) == 5


def test_predict_classifies_image_files(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    paths = []
    for label, mode in ((1, "L"), (2, "RGB")):
        paths.append(str(tmp_path / f"{label}.png"))
        Image.fromarray(images_of(np.array([label]), seed=label)[0]).convert(mode).save(paths[-1])
    rows = json.loads(run("predict", "run", *paths, "--json").stdout)
    assert [(row["file"], row["class"]) for row in rows] == list(zip(paths, ["1", "2"], strict=True))
    assert [line.split()[:2] for line in run("predict", "run", *paths).stdout.splitlines()[1:]] == [
        [paths[0], "1"],
        [paths[1], "2"],
    ]


def test_predict_resizes_an_image_with_a_note(here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "big.png"
    Image.fromarray(images_of(np.array([2]), seed=3)[0].repeat(9, axis=0).repeat(12, axis=1)).save(path)
    result = run("predict", "run", str(path), "--json")
    assert [row["class"] for row in json.loads(result.stdout)] == ["2"]
    assert caplog.messages == [f"adtrain: warning: {path}: resized to 6 x 6 pixels"]


def test_predict_prints_once_what_is_done_to_many_images(
    here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        Image.fromarray(np.full((8 if name == "b" else 9, 9), 5, np.uint8)).save(tmp_path / f"{name}.png")
    assert run("predict", "run", str(tmp_path)).exit_code == 0
    assert caplog.messages == [f"adtrain: warning: {tmp_path}/a.png and 2 more: resized to 6 x 6 pixels"]


def test_predict_with_an_overflowed_model_is_a_one_line_error(here: Path, tmp_path: Path) -> None:
    shutil.copytree("run", tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    save_file({name: x * np.float32(1e38) for name, x in load_file(path).items()}, path, metadata)
    for option in ((), ("--json",)):
        line = one_line(run("predict", str(tmp_path / "run"), "data/t10k-images-idx3-ubyte", *option, expect=2))
        assert line == "the model's predictions are NaN or infinite: its weights overflowed in training"


def test_an_empty_path_is_refused(here: Path) -> None:
    for arguments in (("eval", ""), ("predict", "run", ""), ("train", "tiny.yaml", "--output-dir", "")):
        assert "found an empty path" in one_line(run(*arguments, expect=2))


def test_predict_does_not_need_the_training_data(tmp_path: Path) -> None:
    cfg = write_config(tmp_path)
    train(cfg, tmp_path / "run", "--steps", "1")
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    images = write_idx(tmp_path / "images", images_of(np.array([0]), seed=1))
    assert len(json.loads(run("predict", str(tmp_path / "run"), str(images), "--json").stdout)) == 1


def test_an_invalid_input_is_one_line_and_the_others_are_predicted(here: Path, tmp_path: Path) -> None:
    good = write_idx(tmp_path / "good", images_of(np.array([0]), seed=1))
    wide = write_idx(tmp_path / "wide", np.zeros((2, 6, 7), np.uint8))
    labels = here / "data" / "t10k-labels-idx1-ubyte"
    (tmp_path / "text").write_text("not an image")
    (tmp_path / "folder").mkdir()
    for path, message in (
        (tmp_path / "none.png", "cannot be read (No such file or directory)"),
        (wide, "found uint8[2, 6, 7], expected images uint8[N, 1, 6, 6]"),
        (labels, "found uint8[30], expected images uint8[N, 1, 6, 6]"),
        (tmp_path / "folder", "found a folder without images, expected PNG or JPEG files"),
        (tmp_path / "text", "found neither a PNG nor a JPEG image"),
    ):
        result = run("predict", "run", str(path), str(good), "--json", expect=2)
        assert result.stderr == f"adtrain: error: {path}: {message}\n"
        assert [row["file"] for row in json.loads(result.stdout)] == [str(good)]
    result = run("predict", "run", str(tmp_path / "none.png"), expect=2)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert "Missing argument 'INPUT...'" in one_line(run("predict", "run", expect=2))


@pytest.mark.parametrize("loss", ["mse", "binary_cross_entropy_with_logits"])
def test_probabilities_are_between_0_and_1_for_regression_losses(tmp_path: Path, loss: str) -> None:
    cfg = write_config(tmp_path)
    train(cfg, tmp_path / "run", "--set", f"loss={loss}")
    rows = json.loads(
        run("predict", str(tmp_path / "run"), str(tmp_path / "data" / "t10k-images-idx3-ubyte"), "--json").stdout
    )
    assert len(rows) == 30
    assert all(0 <= row["probability"] <= 1 for row in rows)


def test_eval_refuses_classes_that_the_run_was_not_trained_on(here: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "data", classes=5)
    line = one_line(run("eval", "run", "--data", str(tmp_path / "data"), expect=2))
    what = "found 12 examples of classes that the run was not trained on, such as 3; expected 0, 1, 2"
    assert line == f"{tmp_path}/data: {what}"
    same = run("eval", "run", "--set", f"data.path={tmp_path}/data", expect=2)
    assert one_line(same) == line


@pytest.mark.parametrize("kept", [[2], [0, 2], [1, 0]])
def test_eval_on_other_data_keeps_the_numbers_of_the_classes(here: Path, tmp_path: Path, kept: list[int]) -> None:
    labels = np.resize(kept, 30)
    data = write_npz(tmp_path / "new.npz", {"images": images_of(labels, seed=5), "labels": labels})
    found = json.loads(run("eval", "run", "--data", str(data), "--json").stdout)
    assert (found["images"], found["test"]["accuracy"]) == (30, 1)


def test_eval_takes_changed_settings(here: Path) -> None:
    assert (
        json.loads(run("eval", "run", "--set", "training.metrics=[f1]", "--json").stdout)["metrics"]["f1"]["macro"] == 1
    )
    assert "unknown key" in one_line(run("eval", "run", "--set", "training.metric=[f1]", expect=2))


def test_a_model_trained_on_float32_refuses_uint8_images(tmp_path: Path) -> None:
    cfg = write_config(tmp_path)
    images = np.linspace(-1, 1, 12 * 36, dtype=np.float32).reshape(12, 6, 6)
    file = write_npz(tmp_path / "x.npz", {"images": images, "labels": np.arange(12) % 3})
    train(cfg, tmp_path / "run", "--set", f"data={{path: {file}, test: 0.5, batch_size: 3}}", "--steps", "1")
    numbers = write_idx(tmp_path / "numbers", images)
    assert len(json.loads(run("predict", str(tmp_path / "run"), str(numbers), "--json").stdout)) == 12
    pixels = write_idx(tmp_path / "pixels", np.zeros((1, 6, 6), np.uint8))
    message = f"{pixels}: found uint8[1, 6, 6], expected images float32[N, 1, 6, 6]"
    assert one_line(run("predict", str(tmp_path / "run"), str(pixels), expect=2)) == message
    message = f"{cfg}: the run was trained on float32 numbers, expected an IDX file of them"
    assert one_line(run("predict", str(tmp_path / "run"), str(cfg), expect=2)) == message
