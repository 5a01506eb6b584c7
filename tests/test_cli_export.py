from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import report_runs
from click.testing import Result
from command_line import command
from random_networks import with_arrays
from report_runs import one_line
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from training_runs import write_config

from adtrain import nn
from adtrain.cli.export import FOLDERS, FORMATS
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.export import architectures, onnx_model
from adtrain.export.evaluation import Comparison
from adtrain.training import tensor_file


def run(*arguments: str, expect: int = 0) -> Result:
    return command("export", *arguments, expect=expect)


def train(folder: Path, *options: str) -> None:
    """Train a run into `folder`; its data are in the parent folder."""
    report_runs.train(write_config(folder.parent), folder, *options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a finished run in `run`."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder / "run")
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of the run."""
    shutil.copytree(trained / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.needs_onnx
def test_onnx_is_written_and_compared_on_the_test_images(here: Path) -> None:
    result = run("run", "model.onnx", "--json")
    found = json.loads(result.stdout)
    assert result.stderr == "comparing on 30 test images\n"
    assert list(found) == ["run", "file", "bytes", "parameters", "format", "inputs", "outputs", "check"]
    assert found["bytes"] == (here / "model.onnx").stat().st_size
    assert found["parameters"] == 37 * 16 + 17 * 3
    assert found["inputs"] == {"images": {"dtype": "uint8", "shape": [1, 6, 6]}}
    assert found["outputs"]["probabilities"] == {"dtype": "float32", "shape": [3]}
    assert (found["check"]["images"], found["check"]["different"]) == (30, 0)


@pytest.mark.needs_onnx
def test_the_report_fits_60_columns(here: Path) -> None:
    lines = run("run", "model.onnx").stdout.splitlines() + run("run", "weights.safetensors").stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0] == "file    model.onnx"
    assert lines[2] == "input   images uint8 [N, 1, 6, 6]"
    assert "30 test images: same predictions" in lines[5]


@pytest.mark.needs_onnx
def test_a_different_prediction_is_exit_code_1(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Comparison(30, 2, {"logits": 0.5, "probabilities": 0.25})
    monkeypatch.setattr(onnx_model, "compare", lambda *_: found)
    result = run("run", "model.onnx", expect=1)
    assert "30 test images: 2 predicted otherwise" in result.stdout
    assert "logits within 0.5, probabilities within 0.25" in result.stdout


@pytest.mark.needs_onnx
def test_a_run_that_overflowed_is_refused_and_nothing_is_written(here: Path) -> None:
    path = here / "run" / "model.safetensors"
    with safe_open(path, framework="numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    arrays["2.weight"] = np.full_like(arrays["2.weight"], 3e38)
    save_file(arrays, path, metadata)
    result = run("run", "model.onnx", expect=2)
    assert result.stderr.endswith(
        "error: the model's outputs are NaN or infinite: its weights overflowed in training\n"
    )
    assert not (here / "model.onnx").exists()


@pytest.mark.needs_onnx
def test_a_float64_run_is_written_in_float32_with_a_note(here: Path) -> None:
    train(here / "run64", "--set", "training.precision=float64")
    result = run("run64", "model.onnx", "--json")
    assert result.stderr.startswith("trained in float64, written in float32\n")
    assert json.loads(result.stdout)["check"]["different"] == 0
    run("run64", "weights.safetensors")
    assert {x.dtype for x in load_file(here / "weights.safetensors").values()} == {np.dtype(np.float64)}


@pytest.mark.needs_onnx
def test_without_onnxruntime_nothing_is_compared(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = run("run", "model.onnx")
    assert result.stdout.splitlines()[-1] == "check   not checked: onnxruntime is not installed"
    assert (here / "model.onnx").is_file()


@pytest.mark.needs_onnx
def test_without_its_data_nothing_is_compared(here: Path) -> None:
    config = here / "run" / "config.yaml"
    config.write_text(re.sub("path: [^,}]+", "path: gone", config.read_text()))
    found = json.loads(run("run", "model.onnx", "--json").stdout)
    assert list(found["check"]) == ["skipped"]
    assert found["check"]["skipped"].startswith(f"{here}/gone: found nothing")


def test_without_the_onnx_package_the_error_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    line = one_line(run("run", "model.onnx", expect=2))
    assert line == "writing ONNX needs the package onnx: pip install 'adtrain[export]'"
    assert [path.name for path in here.iterdir()] == ["run"]


def test_safetensors_contains_the_runs_arrays(here: Path) -> None:
    found = json.loads(run("run", "weights.safetensors", "--json").stdout)
    assert list(found) == [
        *("run", "file", "bytes", "parameters", "format", "input", "scale", "mean", "std", "targets", "tensors")
    ]
    assert (found["input"], found["parameters"]) == ({"dtype": "float32", "shape": [36]}, 37 * 16 + 17 * 3)
    ours, written = load_file(here / "run" / "model.safetensors"), load_file(here / "weights.safetensors")
    assert set(ours) == set(written) == set(found["tensors"])
    for name, x in ours.items():
        np.testing.assert_array_equal(written[name], x)


def test_exported_weights_are_read_back_with_the_same_names_and_bits(tmp_path: Path) -> None:
    """By the package safetensors, and by a training that starts from the file."""
    layers = nn.Residual(nn.Sequential(nn.Conv2d(2, kernel_size=3, padding=1), nn.BatchNorm2d())), nn.Flatten()
    trained = with_arrays(nn.Sequential(*layers, nn.Linear(3)), (2, 5, 6), precision="float64")
    state, path = (trained.params, trained.statistics), tmp_path / "weights.safetensors"
    path.write_bytes(architectures.encode_weights(trained))
    bits = [x.numpy().tobytes() for x in tree.leaves(state)]
    names = [name for part in state for name in tree.paths(part)]
    assert {name: x.tobytes() for name, x in load_file(path).items()} == dict(zip(names, bits, strict=True))
    params, statistics = tree.map(lambda x: array(np.zeros_like(x.numpy())), state)
    found = tensor_file.initial_weights(path, params, statistics, partial=False)
    assert [x.numpy().tobytes() for x in tree.leaves(found)] == bits
    assert tensor_file.names_of(path).classes == trained.classes


@pytest.mark.parametrize(
    ("name", "found"),
    [("model", "no extension"), ("model.pt", "the extension .pt"), ("model.ONNX", "the extension .ONNX")],
)
def test_an_unknown_extension_is_a_one_line_error(here: Path, name: str, found: str) -> None:
    line = one_line(run("run", name, expect=2))
    assert line == f"{name}: found {found}, expected {', '.join(each for each in FORMATS if each not in FOLDERS)}"


def test_writing_into_the_runs_folder_is_refused(here: Path) -> None:
    before = (here / "run" / "model.safetensors").read_bytes()
    for path in ("run/model.safetensors", f"{here}/run/../run/new.safetensors"):
        assert one_line(run("run", path, expect=2)).startswith(
            f"{path}: the run's folder holds its own .safetensors files"
        )
    assert (here / "run" / "model.safetensors").read_bytes() == before


def test_an_existing_file_is_replaced(here: Path) -> None:
    (here / "weights.safetensors").write_text("old")
    run("run", "weights.safetensors")
    assert load_file(here / "weights.safetensors")


def test_a_missing_folder_is_a_one_line_error(here: Path) -> None:
    line = one_line(run("run", "none/weights.safetensors", expect=2))
    assert line == "none/weights.safetensors: cannot be written (No such file or directory)"


def test_a_path_without_a_run_is_a_one_line_error(here: Path) -> None:
    assert one_line(run("none", "model.onnx", expect=2)) == "none: found nothing, expected the folder of a run"
