"""Numbers far from 0, such as times in seconds since 1970: their differences reach the network, and its predictions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import c_programs
import numpy as np
import pytest
from command_line import command, invoke
from npz_files import write_npz

import adtrain as ad
from adtrain import data, training
from adtrain.data import DataSet, Options, Rows, npz
from adtrain.data.file_array import FileArray
from adtrain.training import model_file, network

TIME, PRICE = 1_700_000_000, 1e9
SMALL = np.arange(120) % 40

TEXT = """\
name: large
data: {path: PATH, OPTIONS, test: 0.25, batch_size: 16, normalize_targets: true}
model: {layers: [{linear: 8}, relu, {linear: 1}]}
loss: mse
optimizer: {adam: {lr: 0.02}}
training: {epochs: 2, seed: 0}
"""


def normalised(found: DataSet) -> np.ndarray:
    """The features of the training part as a network gets them."""
    factor, shift = (x.reshape(-1) for x in network_of(found).normalization())
    return np.asarray(found.train.images)[:, :, 0, 0] * factor + shift


def network_of(found: DataSet) -> network.Network:
    text = f"data: {{path: x.csv}}\nmodel: {{input: [{len(found.mean)}], layers: [linear: 2]}}\nloss: cross_entropy\n"
    cfg = ad.config.parse((text + "optimizer: {sgd: 1}\ntraining: {epochs: 1}\n").encode(), Path("x.yaml"))
    return network.build(cfg, found.mean, found.std, found.scale, network.task_of(cfg, (), ()))


@pytest.mark.parametrize("far", [0, 300, 10**6, TIME, -TIME, 10**12, 10**15])
@pytest.mark.parametrize("kind", ["csv", "int64", "float64", "float32", "in_file"])
def test_normalised_numbers_are_those_of_float64(tmp_path: Path, far: int, kind: str) -> None:
    numbers = np.stack([far + SMALL, SMALL, np.full(len(SMALL), far)], axis=1)
    if kind == "csv":
        lines = [",".join([*map(str, row), "ab"[i % 2]]) for i, row in enumerate(numbers.tolist())]
        path = tmp_path / "x.csv"
        path.write_text("\n".join(["far,near,constant,label", *lines]))
        found = data.load(path=path, options=Options(header=True), need_test=False)
    else:
        numbers = numbers.astype("int64" if kind == "in_file" else kind)
        path = write_npz(tmp_path / "x.npz", {"X": numbers, "y": SMALL % 2})
        with pytest.MonkeyPatch.context() as patch:
            if kind == "in_file":
                patch.setattr(npz, "stays_in_file", lambda nbytes: True)
            found = data.load(path=path, need_test=False)
        assert isinstance(found.train.images, Rows)
        assert isinstance(found.train.images.base, FileArray) is (kind == "in_file")
    exact = numbers.astype(np.float64) - [far, 0, far]
    deviation = np.where(exact.std(axis=0) > 0, exact.std(axis=0), 1)
    assert found.train.images.dtype == np.float32
    np.testing.assert_allclose(normalised(found), (exact - exact.mean(axis=0)) / deviation, atol=1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on the same table, without and with large numbers added to its feature and its target."""
    folder = tmp_path_factory.mktemp("large")
    found = {}
    for name, time, price in (("near", 0, 0.0), ("far", TIME, PRICE)):
        rows = [f"{time + i},{i % 3},{price + i / 4 + i % 3}" for i in SMALL.tolist()]
        (folder / f"{name}.csv").write_text("\n".join(["time,kind,price", *rows]) + "\n")
        text = TEXT.replace("PATH", str(folder / f"{name}.csv")).replace("OPTIONS", "target: price")
        (folder / f"{name}.yaml").write_text(text)
        command("train", folder / f"{name}.yaml", "--output-dir", folder / name, "--eager")
        found[name] = folder / name
    return found


def inputs_of(time: int) -> dict[str, list[Any]]:
    return {"time": [time + i for i in range(20)], "kind": [i % 3 for i in range(20)]}


@pytest.mark.parametrize("form", ["columns", "csv", "npz", "array"])
def test_predictions_do_not_depend_on_what_is_added(runs: dict[str, Path], tmp_path: Path, form: str) -> None:
    found = {}
    for name, time in (("near", 0), ("far", TIME)):
        columns = inputs_of(time)
        given: Any = columns
        rows = list(zip(*columns.values(), strict=True))
        if form == "csv":
            given = tmp_path / f"{name}.csv"
            given.write_text("\n".join(["time,kind", *(f"{a},{b}" for a, b in rows)]))
        elif form == "npz":
            given = write_npz(tmp_path / f"{name}.npz", {"X": np.array(rows)})
        elif form == "array":
            given = np.array(rows, np.float64)
        model: Any = ad.load(runs[name], device="cpu")
        found[name] = model.predict_values(given)[:, 0]
    assert np.ptp(found["near"]) > 1
    np.testing.assert_allclose(found["far"] - PRICE, found["near"], atol=1e-4)


def test_shown_numbers_have_the_digits_in_which_they_differ(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(f"time,kind\n{TIME},0\n{TIME + 39},0\n")
    shown = [line.split()[-1] for line in command("predict", runs["far"], tmp_path / "x.csv").stdout.splitlines()[-2:]]
    exact = json.loads(command("predict", runs["far"], tmp_path / "x.csv", "--json").stdout)
    np.testing.assert_allclose([float(x) for x in shown], [x["predicted"]["price"] for x in exact], atol=1e-3)
    lines = command("data", "inspect", f"{runs['far']}.csv", "--set", "target=price").stdout.splitlines()
    assert [str(TIME) in line and str(TIME + 39) in line for line in lines if line.startswith("time")] == [True]


def test_evaluation_is_that_of_the_small_numbers(runs: dict[str, Path]) -> None:
    near, far = (json.loads(command("eval", x, "--json", "--device", "cpu").stdout)["test"] for x in runs.values())
    for metric, value in near.items():
        np.testing.assert_allclose(far[metric], value, rtol=1e-3)
    other = json.loads(command("eval", runs["far"], "--data", f"{runs['far']}.csv", "--json", "--device", "cpu").stdout)
    assert other["test"]["rmse"] < 100


def test_exported_c_takes_and_gives_doubles(runs: dict[str, Path], tmp_path: Path) -> None:
    about = json.loads(command("export", runs["far"], tmp_path / "far.c", "--json").stdout)
    assert [x["type"] for x in (*about["inputs"].values(), *about["outputs"].values())] == ["double", "double"]
    assert about["check"]["different"] == 0
    assert about["check"]["outputs"]["values"] < 1e-4
    c_programs.compile_c(["gcc"], tmp_path, "-DFAR_MAIN", "far.c", "-o", "far", "-lm")
    (tmp_path / "row.txt").write_text(f"{TIME + 7} 1\n")
    shown = subprocess.run(["./far", "row.txt"], cwd=tmp_path, capture_output=True, text=True, check=True)
    expected = ad.load(runs["far"], device="cpu").predict_values({"time": [TIME + 7], "kind": [1]})
    assert float(shown.stdout.split()[-1]) == pytest.approx(float(expected[0, 0]), abs=1e-4)
    refused = invoke("export", str(runs["far"]), str(tmp_path / "step.c"), "--training")
    assert "subtract their mean from the data" in refused.stderr


def test_an_onnx_file_takes_and_gives_doubles(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    about = json.loads(command("export", runs["far"], tmp_path / "far.onnx", "--json").stdout)
    assert [x["dtype"] for x in (*about["inputs"].values(), *about["outputs"].values())] == ["float64", "float64"]
    assert about["check"]["different"] == 0
    assert about["check"]["outputs"]["values"] < 1e-4


def test_weights_for_pytorch_come_with_the_normalisation_in_float64(runs: dict[str, Path], tmp_path: Path) -> None:
    for name, expected in (("near", "channel by channel\n"), ("far", "channel by channel, in float64\n")):
        assert expected in command("export", runs[name], tmp_path / "net.safetensors").stdout


def test_a_sweep_has_the_offset_of_its_data(runs: dict[str, Path], tmp_path: Path) -> None:
    text = Path(f"{runs['far']}.yaml").read_text() + "sweep: {optimizer.adam.lr: [0.02, 0.01]}\n"
    (tmp_path / "sweep.yaml").write_text(text)
    command("sweep", tmp_path / "sweep.yaml", "--output-dir", tmp_path / "sweep", "--device", "cpu")
    member = model_file.load(next((tmp_path / "sweep").glob("**/model.safetensors")).parent)
    assert member.network.offset == model_file.load(runs["far"]).network.offset


@pytest.mark.parametrize(
    ("change", "named"), [("data.normalize=false", "column time"), ("data.normalize_targets=false", "target price")]
)
def test_digits_that_float32_loses_are_a_warning_with_the_column(
    runs: dict[str, Path], caplog: pytest.LogCaptureFixture, change: str, named: str
) -> None:
    cfg = ad.config.load(Path(f"{runs['far']}.yaml"), [change])
    training.prepare(cfg)
    key = change.partition("=")[0]
    assert [named in x and "float32 loses" in x and f"{key}: true" in x for x in caplog.messages] == [True]


def test_rows_of_integers_are_numbers_and_not_pixels(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 200, (60, 3), dtype=np.uint8)
    path = write_npz(tmp_path / "x.npz", {"X": rows, "y": (rows[:, 0] > 100).astype(int)})
    found = data.load(path=path, need_test=False)
    assert found.scale == 1
    assert found.train.images.dtype == np.float32
    np.testing.assert_allclose(found.mean, rows.mean(axis=0))
    (tmp_path / "x.yaml").write_text(
        f"data: {{path: {path}, test: 0.2}}\nmodel: {{layers: [linear: 2]}}\nloss: cross_entropy\n"
        "optimizer: {sgd: 0.1}\ntraining: {epochs: 1}\n"
    )
    command("train", tmp_path / "x.yaml", "--output-dir", tmp_path / "run", "--eager")
    model: Any = ad.load(tmp_path / "run", device="cpu")
    other = np.array([[300, 25.5, -1]])
    predicted = model.predict(other).probabilities
    np.testing.assert_array_equal(model.predict(write_npz(tmp_path / "o.npz", {"X": other})).probabilities, predicted)
    np.testing.assert_array_equal(model.predict(rows).probabilities, model.predict(rows.astype(float)).probabilities)
