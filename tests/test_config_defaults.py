"""A config may leave out its name, the input's shape and the batch size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import command
from npz_files import write_npz
from training_runs import TEXT, write_config

import adtrain as ad
from adtrain import config, training

SHORT = TEXT.replace("name: tiny\n", "").replace("  input: [36]\n", "").replace(", batch_size: 16", "")


def test_a_short_config_trains_the_same_model_as_the_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = write_config(tmp_path, SHORT)
    options = ("--device", "cpu", "--set", "data.validation=0")
    shown = command("train", str(short), *options)
    assert "data.batch_size 128 exceeds the 90 training examples: each step takes all of them\n" in shown.stderr
    assert json.loads(Path("runs/tiny/summary.json").read_text())["batch_size"] == 90
    resolved = config.load("runs/tiny/config.yaml")
    assert (resolved.name, resolved.model.input, resolved.data.batch_size) == ("tiny", (36,), 128)
    full = write_config(tmp_path, TEXT.replace("batch_size: 16", "batch_size: 128"))
    command("train", str(full), *options)
    models = [Path("runs", name, "model.safetensors").read_bytes() for name in ("tiny", "tiny-2")]
    assert models[0] == models[1]


def test_the_default_batch_size_is_said(tmp_path: Path) -> None:
    cfg = config.load(write_config(tmp_path, SHORT), ["data={dataset: mnist}", "model.layers.2.linear=10"])
    assert training.outline(cfg).batch_note == "data.batch_size is 128 by default"
    assert training.outline(config.load("smoke")).batch_note is None


@pytest.mark.parametrize("name", ["summary", "graph", "gradcheck"])
def test_commands_that_need_no_data_read_them_for_the_shape(tmp_path: Path, name: str) -> None:
    file = str(write_config(tmp_path, SHORT))
    arguments = {"graph": (file, "-o", str(tmp_path / "x.txt")), "gradcheck": (file,), "summary": (file, "--json")}
    shown = command(name, *arguments[name]).stdout
    assert name != "summary" or json.loads(shown)["input"] == [36]


def test_images_keep_their_shape_for_a_convolution(tmp_path: Path) -> None:
    layers = "[{conv2d: {out_channels: 2, kernel_size: 3}}, flatten, {linear: 3}]"
    cfg = training.with_input(config.load(write_config(tmp_path, SHORT), [f"model.layers={layers}"]))
    assert cfg.model.input == (1, 6, 6)


def test_layers_that_do_not_fit_the_shape_of_the_data_are_refused_in_one_line(tmp_path: Path) -> None:
    cfg = config.load(write_config(tmp_path, SHORT), ["model.layers=[{reshape: [5]}, {linear: 3}]"])
    with pytest.raises(config.ConfigError) as caught:
        training.prepare(cfg)
    assert str(caught.value).endswith("model.layers[0] reshape: shape (5,) has 5 elements, the input 36: (1, 6, 6)")


def test_integer_labels_of_a_regression_are_numbers_without_an_input(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    values = {
        "data": {"path": str(write_npz(tmp_path / "x.npz", {"X": x, "y": np.arange(60)})), "test": 0.2},
        "model": {"layers": [{"linear": 1}]},
        "loss": "mse",
        "optimizer": {"sgd": 0.01},
        "training": {"epochs": 1},
    }
    result = ad.train(values, progress=False, device="cpu")
    assert result.model.targets
    assert (result.model.config.name, result.model.config.model.input) == ("run", (2,))
